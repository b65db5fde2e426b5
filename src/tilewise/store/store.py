"""The measurement store: a database that is only ever appended to, in a file or in PostgreSQL (see `home.py`).

Each timing is a transaction of its own (in PostgreSQL each batch): a killed collector loses at most what it was timing
and continues where it stopped. A batch is opened with the default's first reading and closed with its verdict; one that
a killed collector left open is judged by the next.
Several collectors may write to one store: a kernel is claimed before it is measured (`claims.py`). A file remembers
what machine it was made with and refuses another one's measurements; a shared store keeps them in a part for each.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewise.errors import ConfigurationError
from tilewise.store.claims import Claims
from tilewise.store.home import MOST_STORE_BYTES, Rows, open_home
from tilewise.store.problem import Config, Kernel
from tilewise.store.readable import OPEN, BatchRow, Machine, Readable, Verdict

__all__ = ["MOST_STORE_BYTES", "OPEN", "BatchRow", "Machine", "Store", "Verdict"]
_BATCH = """INSERT INTO batch (run, kernel, round, taken, default_ns, disturbed, watch, uid)
    VALUES (:run, :kernel, :round, :taken, :default_ns, :disturbed, :watch, :uid) ON CONFLICT DO NOTHING"""
_TIMING = "INSERT INTO timing (batch, config, runtime_ps) VALUES (:batch, :config, :runtime_ps) ON CONFLICT DO NOTHING"
_VERDICT = """INSERT INTO verdict (run, kernel, config, status, reason, details)
    SELECT :run, :kernel, :config, :status, :reason, :details WHERE NOT EXISTS (SELECT 1 FROM verdict
    WHERE run = :run AND kernel = :kernel AND config = :config AND status = :status AND reason = :reason)"""
_FINISHED = """INSERT INTO finished (run, kernel, default_config, seconds)
    VALUES (:run, :kernel, :config, :seconds) ON CONFLICT (run, kernel)
    DO UPDATE SET default_config = excluded.default_config, seconds = excluded.seconds"""


@dataclass
class _Travelling:
    """A batch of a shared store, which is written whole when it is judged."""

    run: int
    kernel: Kernel
    round: int
    timings: list[tuple[Config, float]] = field(default_factory=list)


class Store(Readable):
    """An open store. Use as a context manager, or `close` it. `part` chooses whose measurements are read from a shared
    store that holds several machines'; a run that is begun chooses its own."""

    def __init__(self, where: str | os.PathLike[str], *, create: bool = True, part: str | None = None) -> None:
        super().__init__(open_home(where, create), part)
        self.path = Path(self.home.name)
        self.claims = Claims(self.home)
        self._configs: dict[str, int] = {}
        self._kernels: dict[tuple[str, str], int] = {}
        self._travelling: dict[int, _Travelling] = {}

    def close(self) -> None:
        self.claims.close()
        self.home.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, machine: Machine, seed: int, settings: Mapping[str, Any], *, uid: str | None = None) -> int:
        """Start a run and return its number; refuse where a file belongs to another kind of machine."""
        if not self.home.shared:
            self._check_machine(machine)
        self.choose_part(machine)
        values = {"seed": seed, "settings": json.dumps(settings, sort_keys=True), "started": time.time()}
        name = uid or secrets.token_hex(16)
        return self.home.change(lambda rows: self.run_row(rows, machine, {**values, "uid": name}))

    def _check_machine(self, machine: Machine) -> None:
        for kind, identity in self.home.read("SELECT DISTINCT kind, identity FROM machine"):
            if (kind, identity) != (machine.kind, machine.identity):
                raise ConfigurationError(
                    f"{self.name} was measured on {identity} ({kind}), and this is {machine.identity} "
                    f"({machine.kind}); give another --out, since runtimes of two machines must not be mixed."
                )

    def run_row(self, rows: Rows, machine: Machine, values: Mapping[str, Any]) -> int:
        """Within a transaction: the number of the run with this uid, made if it is not there."""
        details = json.dumps(machine.details, sort_keys=True)
        row = {"kind": machine.kind, "identity": machine.identity, "details": details}
        rows.run(
            "INSERT INTO machine (kind, identity, details) VALUES (:kind, :identity, :details) ON CONFLICT DO NOTHING",
            row,
        )
        query = "SELECT id FROM machine WHERE kind = :kind AND identity = :identity AND details = :details"
        number = rows.all(query, row)[0][0]
        rows.run(
            """INSERT INTO run (machine, started, seed, settings, uid)
            VALUES (:machine, :started, :seed, :settings, :uid) ON CONFLICT DO NOTHING""",
            {**values, "machine": number},
        )
        return int(rows.all("SELECT id FROM run WHERE uid = :uid", {"uid": values["uid"]})[0][0])

    def claim(self, run: int, kernel: Kernel, *, again: bool = False) -> bool:
        """Take a kernel for this process; False if a living process holds it or, unless `again`, it is finished."""

        def work(rows: Rows) -> int | None:
            number = self.kernel_row(rows, kernel)
            return number if self.claims.take(rows, run, number, again) else None

        number = self.home.change(work)
        if number is not None:
            self.claims.hold(run, number)
        return number is not None

    def claim_next(self, run: int) -> Kernel | None:
        """The first kernel of the queue that nobody measures, claimed; None where there is none."""
        found = self.home.change(lambda rows: self.claims.next(rows, run, self.part))
        if found is None:
            return None
        self.claims.hold(run, found[0])
        return self.kernel_of(*found[1:])

    def plan(self, kernels: Sequence[Kernel], *, priority: float = 0.0, why: str = "planned") -> int:
        """Queue those of the kernels that are neither finished nor waiting, and say how many they were."""
        query = f"""INSERT INTO queue (kernel, priority, why, added) SELECT :kernel, :priority, :why, {self.home.now}
            WHERE NOT EXISTS (SELECT 1 FROM finished WHERE kernel = :kernel) ON CONFLICT DO NOTHING"""

        def work(rows: Rows) -> int:
            numbers = [self.kernel_row(rows, kernel) for kernel in kernels]
            return sum(rows.run(query, {"kernel": n, "priority": float(priority), "why": why}) for n in numbers)

        return self.home.change(work)

    def unplan(self, kernel: Kernel) -> None:
        """Take a kernel off the queue: it cannot be measured here."""
        query = "DELETE FROM queue WHERE kernel = :kernel"
        self.home.change(lambda rows: rows.run(query, {"kernel": self.kernel_row(rows, kernel)}))

    def postpone(self, kernel: Kernel) -> None:
        """Let the others of the queue go first."""
        query = "UPDATE queue SET priority = (SELECT min(priority) FROM queue) - 1 WHERE kernel = :kernel"
        self.home.change(lambda rows: rows.run(query, {"kernel": self.kernel_row(rows, kernel)}))

    def waiting(self) -> int:
        """How many kernels are queued, those that are being measured included."""
        query = "SELECT count(*) FROM queue JOIN kernel ON kernel.id = queue.kernel WHERE part = :part"
        return int(self.home.read(query, {"part": self.part})[0][0])

    def queued(self) -> list[tuple[Kernel, str]]:
        """What waits to be measured, the next first, and why."""
        query = """SELECT program, problem, why FROM queue JOIN kernel ON kernel.id = queue.kernel
            WHERE kernel.part = :part ORDER BY priority DESC, queue.id"""
        rows = self.home.read(query, {"part": self.part})
        return [(self.kernel_of(program, problem), str(why)) for program, problem, why in rows]

    def add_verdicts(self, run: int, kernel: Kernel, verdicts: Sequence[Verdict]) -> None:
        def work(rows: Rows) -> None:
            number = self._held(rows, kernel)
            for v in verdicts:
                row = {"status": v.status, "reason": v.reason, "details": _short(v.details)}
                self.add_verdict(rows, {**row, "run": run, "kernel": number}, v.config)

        self.home.change(work)

    def add_verdict(self, rows: Rows, values: Mapping[str, Any], config: Config) -> None:
        """Within a transaction: say something of a configuration, once."""
        row = {name: values[name] for name in ("run", "kernel", "status", "reason", "details")}
        rows.run(_VERDICT, {**row, "config": self._config(rows, config)})

    def add_timings(self, rows: Rows, batch: int, timings: Sequence[tuple[Config, int]]) -> None:
        """Within a transaction: picoseconds of configurations in a batch; those that are there already stay."""
        found = [{"batch": batch, "config": self._config(rows, config), "runtime_ps": ps} for config, ps in timings]
        rows.many(_TIMING, found)

    def add_finished(self, rows: Rows, run: int, kernel: int, default: Config, seconds: float) -> None:
        """Within a transaction: mark a kernel as finished; nobody waits for it any longer."""
        rows.run(_FINISHED, {"run": run, "kernel": kernel, "config": self._config(rows, default), "seconds": seconds})
        rows.run("DELETE FROM claim WHERE kernel = :kernel", {"kernel": kernel})
        rows.run("DELETE FROM queue WHERE kernel = :kernel", {"kernel": kernel})

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
        """Append one batch: all of it, or nothing; nothing where a batch of this `uid` is there already."""
        values: dict[str, Any] = {"run": run, "round": round_number, "taken": time.time(), "default_ns": default_ns}
        values |= {"disturbed": int(disturbed), "watch": _short(watch), "uid": uid or secrets.token_hex(16)}

        def work(rows: Rows) -> None:
            if rows.run(_BATCH, {**values, "kernel": self._held(rows, kernel)}):
                number = _batch_number(rows, values["uid"])
                self.add_timings(rows, number, [(config, _ps(runtime_ns)) for config, runtime_ns in timings])

        self.home.change(work)

    def open_batch(self, run: int, kernel: Kernel, round_number: int, default_ns: float) -> int:
        """Begin a batch whose timings come one by one; gives its number."""
        if self.home.shared:
            number = -1 - len(self._travelling)
            self._travelling[number] = _Travelling(run, kernel, round_number)
            return number
        values: dict[str, Any] = {"run": run, "round": round_number, "taken": time.time(), "default_ns": default_ns}
        values |= {"disturbed": OPEN, "watch": "", "uid": secrets.token_hex(16)}

        def work(rows: Rows) -> int:
            rows.run(_BATCH, {**values, "kernel": self.kernel_row(rows, kernel)})
            return _batch_number(rows, values["uid"])

        return self.home.change(work)

    def add_timing(self, batch: int, config: Config, runtime_ns: float) -> None:
        """One timing of an open batch."""
        if batch < 0:
            self._travelling[batch].timings.append((config, runtime_ns))
            return
        self.home.change(lambda rows: self.add_timings(rows, batch, [(config, _ps(runtime_ns))]))

    def close_batch(
        self, batch: int, default_ns: float, *, disturbed: bool, watch: Mapping[str, float] | None = None
    ) -> None:
        """Judge an open batch. This is the only row that is ever changed."""
        if batch < 0:
            known = self._travelling.pop(batch)
            self.add_batch(
                known.run, known.kernel, known.round, default_ns, known.timings, disturbed=disturbed, watch=watch
            )
            return
        query = """UPDATE batch SET default_ns = :default_ns, disturbed = :disturbed, watch = :watch
            WHERE id = :batch AND disturbed = :open"""
        values = {"default_ns": default_ns, "disturbed": int(disturbed), "watch": _short(watch)}
        self.home.change(lambda rows: rows.run(query, {**values, "batch": batch, "open": OPEN}))

    def finish(self, run: int, kernel: Kernel, default: Config, seconds: float) -> None:
        """Everything about the kernel is in; it will not be measured again in this store."""

        def work(rows: Rows) -> int:
            number = self._held(rows, kernel)
            self.add_finished(rows, run, number, default, float(seconds))
            return number

        self.claims.drop(self.home.change(work))

    def release(self, kernel: Kernel) -> None:
        """Give a claim back without calling the kernel finished: it may be measured again."""

        def work(rows: Rows) -> int:
            number = self.kernel_row(rows, kernel)
            self.claims.release(rows, number)
            return number

        self.claims.drop(self.home.change(work))

    def release_run(self, run: int) -> None:
        """Give back what a run held whose process is known to have ended."""
        self.home.change(lambda rows: rows.run("DELETE FROM claim WHERE run = :run", {"run": run}))

    def _held(self, rows: Rows, kernel: Kernel) -> int:
        """The kernel's number, unless this process has lost it to another."""
        number = self.kernel_row(rows, kernel)
        self.claims.check(rows, number)
        return number

    def kernel_row(self, rows: Rows, kernel: Kernel) -> int:
        """The row of a kernel, made if it is not there. Numbers are only remembered from committed rows."""
        key = (self.part, kernel.problem.key)
        if key not in self._kernels:
            values = {"part": key[0], "problem": key[1], "program": kernel.program}
            query = "SELECT id FROM kernel WHERE problem = :problem AND part = :part"
            found = rows.all(query, values)
            if not found:
                insert = "INSERT INTO kernel (part, problem, program) VALUES (:part, :problem, :program)"
                rows.run(f"{insert} ON CONFLICT DO NOTHING", values)
                return int(rows.all(query, values)[0][0])
            self._kernels[key] = int(found[0][0])
        return self._kernels[key]

    def _config(self, rows: Rows, config: Config) -> int:
        if config.key not in self._configs:
            values, query = {"key": config.key}, "SELECT id FROM config WHERE key = :key"
            found = rows.all(query, values)
            if not found:
                rows.run("INSERT INTO config (key) VALUES (:key) ON CONFLICT DO NOTHING", values)
                return int(rows.all(query, values)[0][0])
            self._configs[config.key] = int(found[0][0])
        return self._configs[config.key]


def _batch_number(rows: Rows, uid: Any) -> int:
    return int(rows.all("SELECT id FROM batch WHERE uid = :uid", {"uid": uid})[0][0])


def _ps(runtime_ns: float) -> int:
    return round(runtime_ns * 1000)


def _short(details: Mapping[str, Any] | None) -> str:
    return json.dumps(details, separators=(",", ":")) if details else ""
