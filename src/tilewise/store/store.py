"""The measurement store: an append-only database in a SQLite file or in PostgreSQL (see `database.py`).

Each timing is one transaction (in PostgreSQL each batch): a killed collector loses at most the timing in progress, and
the next one continues where it stopped. A batch is opened with the default's first timing and closed with the decision
whether it was disturbed; the next collector decides about a batch that was left open.

Several collectors may write to one store: a collector claims a kernel before it measures it (`claims.py`). A file
belongs to one kind of machine and refuses measurements of another; a shared store has a partition for each kind.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise.errors import ConfigurationError, Rejected
from tilewise.store.database import MAX_STORE_BYTES, Transaction, open_database
from tilewise.store.problem import Config, Kernel, Machine
from tilewise.store.reader import OPEN, BatchRow, StoreReader, Verdict

if TYPE_CHECKING:
    from tilewise.store.claims import Claims

__all__ = ["MAX_STORE_BYTES", "OPEN", "BatchRow", "Machine", "Store", "Verdict"]
_BATCH = """INSERT INTO batch (run, kernel, round, taken, default_ns, disturbed, watch, uid)
    VALUES (:run, :kernel, :round, :taken, :default_ns, :disturbed, :watch, :uid) ON CONFLICT DO NOTHING"""
_TIMING = "INSERT INTO timing (batch, config, runtime_ps) VALUES (:batch, :config, :runtime_ps) ON CONFLICT DO NOTHING"
_VERDICT = """INSERT INTO verdict (run, kernel, config, status, reason, details)
    SELECT :run, :kernel, :config, :status, :reason, :details WHERE NOT EXISTS (SELECT 1 FROM verdict
    WHERE run = :run AND kernel = :kernel AND config = :config AND status = :status AND reason = :reason)"""
_FINISHED = """INSERT INTO finished (run, kernel, default_config, seconds)
    VALUES (:run, :kernel, :config, :seconds) ON CONFLICT (run, kernel)
    DO UPDATE SET default_config = excluded.default_config, seconds = excluded.seconds"""


class Store(StoreReader):
    """An open store; use it as a context manager, or `close` it.

    `partition` selects the kind of machine whose measurements are read from a shared store; `begin` selects its own.
    """

    def __init__(self, where: str | os.PathLike[str], *, create: bool = True, partition: str | None = None) -> None:
        """Open a store by path or URL; `create` makes a missing one."""
        super().__init__(open_database(where, create), partition)
        self.path = Path(self.database.name)
        self._claims: Claims | None = None
        self._configs: dict[str, int] = {}
        self._kernels: dict[tuple[str, str], int] = {}
        # Open batches of a shared store: run, kernel, round and timings. Closing one writes it as one transaction.
        self._buffered: dict[int, tuple[int, Kernel, int, list[tuple[Config, float]]]] = {}

    @property
    def claims(self) -> Claims:
        """Claims of kernels by this process, created at the first use."""
        if self._claims is None:
            from tilewise.store.claims import Claims

            self._claims = Claims(self.database)
        return self._claims

    def close(self) -> None:
        """Close the claims, if there are any, and the database."""
        if self._claims is not None:
            self._claims.close()
        self.database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, machine: Machine, seed: int, settings: Mapping[str, Any], *, uid: str | None = None) -> int:
        """Record the start of a measurement run on this machine; return its number.

        Raise for another kind of machine.
        """
        if not self.database.shared:
            self._check_machine(machine)
        self.choose_partition(machine)
        values = {"seed": seed, "settings": json.dumps(settings, sort_keys=True), "started": time.time()}
        name = uid or secrets.token_hex(16)
        return self.database.write(lambda transaction: self.add_run(transaction, machine, {**values, "uid": name}))

    def _check_machine(self, machine: Machine) -> None:
        """Raise if the file has measurements of another kind of machine."""
        for kind, identity in self.database.read("SELECT DISTINCT kind, identity FROM machine"):
            if (kind, identity) != (machine.kind, machine.identity):
                raise ConfigurationError(
                    f"{self.name} was measured on {identity} ({kind}), and this is {machine.identity} "
                    f"({machine.kind}); give another --out, since runtimes of two machines must not be mixed."
                )

    def add_run(self, transaction: Transaction, machine: Machine, values: Mapping[str, Any]) -> int:
        """Add a run in a transaction unless one with its uid exists; return its number."""
        details = json.dumps(machine.details, sort_keys=True)
        row = {"kind": machine.kind, "identity": machine.identity, "details": details}
        transaction.execute(
            "INSERT INTO machine (kind, identity, details) VALUES (:kind, :identity, :details) ON CONFLICT DO NOTHING",
            row,
        )
        query = "SELECT id FROM machine WHERE kind = :kind AND identity = :identity AND details = :details"
        number = transaction.fetch(query, row)[0][0]
        transaction.execute(
            """INSERT INTO run (machine, started, seed, settings, uid)
            VALUES (:machine, :started, :seed, :settings, :uid) ON CONFLICT DO NOTHING""",
            {**values, "machine": number},
        )
        return int(transaction.fetch("SELECT id FROM run WHERE uid = :uid", {"uid": values["uid"]})[0][0])

    def claim(self, run: int, kernel: Kernel, *, again: bool = False) -> bool:
        """Claim a kernel for this process; return False if a living process has it, or it is finished.

        With `again` a finished kernel is claimed too.
        """

        def work(transaction: Transaction) -> int | None:
            number = self.add_kernel(transaction, kernel)
            return number if self.claims.claim(transaction, run, number, again) else None

        number = self.database.write(work)
        if number is not None:
            self.claims.start_renewing(run, number)
        return number is not None

    def claim_next(self, run: int) -> Kernel | None:
        """Claim, for this process, the first queued kernel that no process is measuring; None without one."""
        claim = self.database.write(lambda transaction: self.claims.claim_next(transaction, run, self.partition))
        if claim is None:
            return None
        number, program, problem = claim
        self.claims.start_renewing(run, number)
        return self.kernel_of(program, problem)

    def plan(self, kernels: Sequence[Kernel], *, priority: float = 0.0, why: str = "planned") -> int:
        """Queue the kernels that are neither finished nor queued; return how many that are."""
        query = f"""INSERT INTO queue (kernel, part, priority, why, added)
            SELECT :kernel, :part, :priority, :why, {self.database.now_sql}
            WHERE NOT EXISTS (SELECT 1 FROM finished WHERE kernel = :kernel) ON CONFLICT DO NOTHING"""

        def work(transaction: Transaction) -> int:
            values = {"part": self.partition, "priority": float(priority), "why": why}
            numbers = [self.add_kernel(transaction, kernel) for kernel in kernels]
            return sum(transaction.execute(query, {**values, "kernel": number}) for number in numbers)

        return self.database.write(work)

    def dequeue(self, kernel: Kernel) -> None:
        """Remove a kernel from the queue because it cannot be measured on this machine."""
        self._update_queue("DELETE FROM queue WHERE kernel = :kernel", kernel)

    def postpone(self, kernel: Kernel) -> None:
        """Move a kernel to the end of the queue."""
        last = "(SELECT min(priority) FROM queue WHERE part = :part)"
        query = f"UPDATE queue SET priority = {last} - 1 WHERE kernel = :kernel"
        self._update_queue(query, kernel, part=self.partition)

    def _update_queue(self, query: str, kernel: Kernel, **values: Any) -> None:
        """Execute a statement about the queue entry of `kernel`, which is added if it is new."""

        def work(transaction: Transaction) -> None:
            transaction.execute(query, {"kernel": self.add_kernel(transaction, kernel), **values})

        self.database.write(work)

    def queue_length(self) -> int:
        """Return the number of queued kernels, including those that are being measured."""
        query = "SELECT count(*) FROM queue WHERE part = :part"
        return int(self.database.read(query, {"part": self.partition})[0][0])

    def queue(self) -> list[tuple[Kernel, str]]:
        """Return the queued kernels, the next one first, each with the reason why it is queued."""
        query = """SELECT program, problem, why FROM queue JOIN kernel ON kernel.id = queue.kernel
            WHERE queue.part = :part ORDER BY priority DESC, queue.id"""
        rows = self.database.read(query, {"part": self.partition})
        return [(self.kernel_of(program, problem), str(why)) for program, problem, why in rows]

    def add_verdicts(self, run: int, kernel: Kernel, verdicts: Sequence[Verdict]) -> None:
        """Store verdicts (correct, wrong, failed, ...) on configurations of a kernel."""

        def work(transaction: Transaction) -> None:
            """Insert the verdicts in a transaction."""
            number = self._claimed_kernel(transaction, kernel)
            for verdict in verdicts:
                row = {"status": verdict.status, "reason": verdict.reason, "details": _encode(verdict.details)}
                self.add_verdict(transaction, {**row, "run": run, "kernel": number}, verdict.config)

        self.database.write(work)

    def add_verdict(self, transaction: Transaction, values: Mapping[str, Any], config: Config) -> None:
        """Store a verdict about a configuration within a transaction, unless an equal one exists."""
        row = {name: values[name] for name in ("run", "kernel", "status", "reason", "details")}
        transaction.execute(_VERDICT, {**row, "config": self._add_config(transaction, config)})

    def add_timings(self, transaction: Transaction, batch: int, timings: Sequence[tuple[Config, int]]) -> None:
        """Store timings in ps in a transaction; configurations that the batch already has are skipped."""
        rows = [
            {"batch": batch, "config": self._add_config(transaction, config), "runtime_ps": runtime_ps}
            for config, runtime_ps in timings
        ]
        transaction.execute_many(_TIMING, rows)

    def add_finished(self, transaction: Transaction, run: int, kernel: int, default: Config, seconds: float) -> None:
        """Mark a kernel as finished in a transaction; its claim and its queue entry are removed."""
        config = self._add_config(transaction, default)
        transaction.execute(_FINISHED, {"run": run, "kernel": kernel, "config": config, "seconds": seconds})
        transaction.execute("DELETE FROM claim WHERE kernel = :kernel", {"kernel": kernel})
        transaction.execute("DELETE FROM queue WHERE kernel = :kernel", {"kernel": kernel})

    def add_batch(
        self,
        run: int,
        kernel: Kernel,
        round_number: int,
        default_ns: float,
        timings: Sequence[tuple[Config, float]],
        *,
        disturbed: bool = False,
        watch: Mapping[str, float] | None = None,
        uid: str | None = None,
    ) -> None:
        """Append one batch atomically; do nothing if the same batch with this `uid` exists.

        Other measurements under the same `uid` are an error (Rejected, "conflict"): one of the two would be lost.
        """
        values: dict[str, Any] = {"run": run, "round": round_number, "taken": time.time(), "default_ns": default_ns}
        values |= {"disturbed": int(disturbed), "watch": _encode(watch), "uid": uid or secrets.token_hex(16)}

        def work(transaction: Transaction) -> None:
            """Insert the batch; one with the same uid must have the same content."""
            kernel_number = self._claimed_kernel(transaction, kernel)
            times = [(config, _to_picoseconds(runtime_ns)) for config, runtime_ns in timings]
            is_new = transaction.execute(_BATCH, {**values, "kernel": kernel_number})
            number = _batch_number(transaction, values["uid"])
            if is_new:
                self.add_timings(transaction, number, times)
                return
            query, stored = "SELECT kernel, default_ns FROM batch WHERE id = :batch", {"batch": number}
            is_identical = [tuple(row) for row in transaction.fetch(query, stored)] == [(kernel_number, default_ns)]
            query = "SELECT config, runtime_ps FROM timing WHERE batch = :batch"
            rows = {(int(config), int(runtime_ps)) for config, runtime_ps in transaction.fetch(query, stored)}
            if not is_identical or rows != {(self._add_config(transaction, config), ps) for config, ps in times}:
                raise Rejected("conflict", "a batch with this uid and other measurements exists; choose a new uid")

        self.database.write(work)

    def open_batch(self, run: int, kernel: Kernel, round_number: int, default_ns: float) -> int:
        """Begin a batch of timings of a kernel, to be added one by one; return the batch's number."""
        # A shared store is a network round trip away, so its batches are buffered. Their numbers are negative.
        if self.database.shared:
            number = -1 - len(self._buffered)
            self._buffered[number] = run, kernel, round_number, []
            return number
        values: dict[str, Any] = {"run": run, "round": round_number, "taken": time.time(), "default_ns": default_ns}
        values |= {"disturbed": OPEN, "watch": "", "uid": secrets.token_hex(16)}

        def work(transaction: Transaction) -> int:
            transaction.execute(_BATCH, {**values, "kernel": self._claimed_kernel(transaction, kernel)})
            return _batch_number(transaction, values["uid"])

        return self.database.write(work)

    def add_timing(self, batch: int, config: Config, runtime_ns: float) -> None:
        """Add one timing to an open batch."""
        if batch < 0:
            self._buffered[batch][-1].append((config, runtime_ns))
            return
        self.database.write(
            lambda transaction: self.add_timings(transaction, batch, [(config, _to_picoseconds(runtime_ns))])
        )

    def close_batch(
        self, batch: int, default_ns: float, *, disturbed: bool, watch: Mapping[str, float] | None = None
    ) -> None:
        """End an open batch and store the default's time and whether it was disturbed."""
        if batch < 0:
            run, kernel, round_number, timings = self._buffered.pop(batch)
            self.add_batch(run, kernel, round_number, default_ns, timings, disturbed=disturbed, watch=watch)
            return
        query = """UPDATE batch SET default_ns = :default_ns, disturbed = :disturbed, watch = :watch
            WHERE id = :batch AND disturbed = :open"""
        values = {"default_ns": default_ns, "disturbed": int(disturbed), "watch": _encode(watch)}
        self.database.write(lambda transaction: transaction.execute(query, {**values, "batch": batch, "open": OPEN}))

    def finish(self, run: int, kernel: Kernel, default: Config, seconds: float) -> None:
        """Mark a kernel as finished by `run` after `seconds`; it is not measured again in this store."""

        def work(transaction: Transaction) -> int:
            number = self._claimed_kernel(transaction, kernel)
            self.add_finished(transaction, run, number, default, float(seconds))
            return number

        self.claims.stop_renewing(self.database.write(work))

    def release(self, kernel: Kernel) -> None:
        """Release a kernel's claim without finishing it, so that it may be measured again."""

        def work(transaction: Transaction) -> int:
            number = self.add_kernel(transaction, kernel)
            self.claims.release(transaction, number)
            return number

        self.claims.stop_renewing(self.database.write(work))

    def release_run(self, run: int) -> None:
        """Release the claims of a run whose process has ended."""
        self.database.write(lambda transaction: transaction.execute("DELETE FROM claim WHERE run = :run", {"run": run}))

    def _claimed_kernel(self, transaction: Transaction, kernel: Kernel) -> int:
        """Return a kernel's number; raise `LostClaimError` if this process has lost its claim."""
        number = self.add_kernel(transaction, kernel)
        if self._claims is not None:
            self._claims.check(transaction, number)
        return number

    def add_kernel(self, transaction: Transaction, kernel: Kernel) -> int:
        """Add a kernel within a transaction, unless it exists; return its number."""
        key = (self.partition, kernel.problem.key)
        if key not in self._kernels:
            values = {"part": key[0], "problem": key[1], "program": kernel.program}
            query = "SELECT id FROM kernel WHERE problem = :problem AND part = :part"
            rows = transaction.fetch(query, values)
            # The number of a new row is not cached: the transaction may still be rolled back.
            if not rows:
                insert = "INSERT INTO kernel (part, problem, program) VALUES (:part, :problem, :program)"
                transaction.execute(f"{insert} ON CONFLICT DO NOTHING", values)
                return int(transaction.fetch(query, values)[0][0])
            self._kernels[key] = int(rows[0][0])
        return self._kernels[key]

    def _add_config(self, transaction: Transaction, config: Config) -> int:
        """Return the row id of a configuration, which is inserted if it is new."""
        if config.key not in self._configs:
            values, query = {"key": config.key}, "SELECT id FROM config WHERE key = :key"
            rows = transaction.fetch(query, values)
            if not rows:
                transaction.execute("INSERT INTO config (key) VALUES (:key) ON CONFLICT DO NOTHING", values)
                return int(transaction.fetch(query, values)[0][0])
            self._configs[config.key] = int(rows[0][0])
        return self._configs[config.key]


def _batch_number(transaction: Transaction, uid: Any) -> int:
    return int(transaction.fetch("SELECT id FROM batch WHERE uid = :uid", {"uid": uid})[0][0])


def _to_picoseconds(runtime_ns: float) -> int:
    """Convert nanoseconds to integer picoseconds, the unit of stored times."""
    return round(runtime_ns * 1000)


def _encode(details: Mapping[str, Any] | None) -> str:
    """Encode a mapping as compact JSON; "" if it is empty or None."""
    return json.dumps(details, separators=(",", ":")) if details else ""
