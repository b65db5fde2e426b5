"""Claims: a collector claims a kernel before it measures it, so that several collectors can share one store.

A claim is valid while its process lives. Only a process on the same boot of the same machine and in the same PID
namespace can be looked up: two containers may share a hostname, and the same process id then means two processes. All
other claims are leases: a claim that was not renewed within the lease is free again, because its machine may be gone.
On a shared store a thread of each process renews its claims by heartbeats; in a file, every write about the kernel
does.

A process that lost a claim on a shared store (a suspended machine, a broken network) gets `LostClaimError` at its next
write and writes nothing, so that its timings do not mix with those of the new holder. `claim_next` takes the first
unclaimed kernel of the queue; on PostgreSQL it skips rows that others are claiming at this moment instead of waiting.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from pathlib import Path
from typing import Any

from tilewise.errors import TilewiseError
from tilewise.store.database import Database, Transaction

_HEARTBEATS_PER_LEASE = 5
_INITIAL_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of Linux: not in a container
_CLAIM = """INSERT INTO claim (kernel, run, host, process, born, taken)
    VALUES (:kernel, :run, :host, :process, :born, {now})
    ON CONFLICT (kernel) DO UPDATE SET run = excluded.run, host = excluded.host, process = excluded.process,
    born = excluded.born, taken = excluded.taken"""
_NEXT = """SELECT queue.kernel, kernel.program, kernel.problem FROM queue JOIN kernel ON kernel.id = queue.kernel
    LEFT JOIN claim ON claim.kernel = queue.kernel
    WHERE queue.part = :part AND (claim.kernel IS NULL OR claim.taken < {now} - :lease)
    ORDER BY queue.priority DESC, queue.id LIMIT 1{skip}"""


class LostClaimError(Exception):
    """Raised when another collector has taken the kernel over, so that this one must not write about it."""


class Claims:
    """The claims of kernels in one open store, including those of this process."""

    def __init__(self, database: Database) -> None:
        """Start without claims of this process."""
        self._database = database
        self._own_claims: dict[int, int] = {}  # kernel -> run, of this process
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def claim(self, transaction: Transaction, run: int, kernel: int, again: bool) -> bool:
        """Claim a kernel for `run` (a finished one only if `again`); return False if it cannot be claimed."""
        transaction.fetch(f"SELECT id FROM kernel WHERE id = :kernel{self._database.lock_sql}", {"kernel": kernel})
        if not again and transaction.fetch("SELECT 1 FROM finished WHERE kernel = :kernel LIMIT 1", {"kernel": kernel}):
            return False
        current = self._claim_of(transaction, kernel)
        if current is not None and current[:3] != _process_identity() and self._is_valid(*current):
            return False
        self._insert(transaction, run, kernel)
        return True

    def claim_next(self, transaction: Transaction, run: int, partition: str) -> tuple[int, Any, Any] | None:
        """Claim the first unclaimed kernel of the queue in a transaction; return its number, program and problem."""
        query = _NEXT.format(now=self._database.now_sql, skip=self._database.skip_locked_sql)
        while True:
            rows = transaction.fetch(query, {"part": partition, "lease": self._database.lease_s})
            if not rows and not self._release_dead(transaction):
                return None
            if not rows:
                continue
            # A process that had the row locked may have claimed it between the query's snapshot and our lock. A process
            # that lives on this machine keeps its claim beyond the lease.
            number, program, problem = rows[0]
            current = self._claim_of(transaction, number)
            if current is None or not self._is_valid(*current):
                self._insert(transaction, run, number)
                return int(number), program, problem
            renew = f"UPDATE claim SET taken = {self._database.now_sql} WHERE kernel = :kernel"
            transaction.execute(renew, {"kernel": number})

    def _claim_of(self, transaction: Transaction, kernel: int) -> tuple[str, int, str, float] | None:
        """Return (host, process id, start time, age in seconds) of a kernel's claim, or None."""
        query = f"SELECT host, process, born, {self._database.now_sql} - taken FROM claim WHERE kernel = :kernel"
        claims = transaction.fetch(query, {"kernel": kernel})
        return (claims[0][0], claims[0][1], claims[0][2], float(claims[0][3])) if claims else None

    def _release_dead(self, transaction: Transaction) -> bool:
        """Release the claims of processes of this machine that have ended; return whether there were any."""
        claims = transaction.fetch("SELECT kernel, host, process, born FROM claim")
        dead = [kernel for kernel, host, process, born in claims if self._is_dead(host, process, born)]
        for kernel in dead:
            transaction.execute("DELETE FROM claim WHERE kernel = :kernel", {"kernel": kernel})
        return bool(dead)

    def _insert(self, transaction: Transaction, run: int, kernel: int) -> None:
        """Insert this process's claim of a kernel; it expires unless it is renewed within the lease."""
        host, process, born = _process_identity()
        values = {"kernel": kernel, "run": run, "host": host, "process": process, "born": born}
        transaction.execute(_CLAIM.format(now=self._database.now_sql), values)

    def _is_valid(self, host: str, process: int, born: str, age_s: float) -> bool:
        """Tell whether a claim counts: its process runs on this machine, or it was renewed within the lease."""
        if self._is_dead(host, process, born):
            return False
        return host == _host_identity() or age_s < self._database.lease_s

    def _is_dead(self, host: str, process: int, born: str) -> bool:
        """Tell whether a claim's process is known to have ended; False for other machines."""
        own_host = _host_identity()
        if host == own_host:
            start = _start_time(process)
            return start != born if start and born else not _process_exists(process)
        if self._database.shared:
            return False
        # A file is on a local disk. There, a claim from another boot of this host, outside containers, has ended.
        name, _, namespace = (*host.split(" "), "", "")[:3]
        own_name, _, own_namespace = (*own_host.split(" "), "", "")[:3]
        return name == own_name and namespace == own_namespace == _INITIAL_NAMESPACE

    def start_renewing(self, run: int, kernel: int) -> None:
        """Renew a claim by heartbeats from now on; to be called after its transaction is committed."""
        self._own_claims[kernel] = run
        if self._database.shared and self._thread is None:
            self._thread = threading.Thread(target=self._renew_periodically, name="claims", daemon=True)
            self._thread.start()

    def stop_renewing(self, kernel: int) -> None:
        """Stop renewing a claim."""
        self._own_claims.pop(kernel, None)

    def check(self, transaction: Transaction, kernel: int) -> None:
        """Raise `LostClaimError` if another process has taken over a kernel that this one claimed in a shared store.

        In a SQLite file, where no thread renews claims, the claim is renewed instead.
        """
        run = self._own_claims.get(kernel)
        if run is None:
            return
        if not self._database.shared:
            query = f"UPDATE claim SET taken = {self._database.now_sql} WHERE kernel = :kernel AND run = :run"
            transaction.execute(query, {"kernel": kernel, "run": run})
            return
        query = f"SELECT 1 FROM claim WHERE kernel = :kernel AND run = :run{self._database.lock_sql}"
        if not transaction.fetch(query, {"kernel": kernel, "run": run}):
            raise LostClaimError("another collector has taken this kernel over")

    def release(self, transaction: Transaction, kernel: int) -> None:
        """Delete a kernel's claim; in a shared store only this process's own."""
        run = self._own_claims.get(kernel) if self._database.shared else None
        if run is None:
            transaction.execute("DELETE FROM claim WHERE kernel = :kernel", {"kernel": kernel})
        else:
            query = "DELETE FROM claim WHERE kernel = :kernel AND run = :run"
            transaction.execute(query, {"kernel": kernel, "run": run})

    def renew(self) -> None:
        """Renew all claims of this process once."""
        query = f"UPDATE claim SET taken = {self._database.now_sql} WHERE kernel = :kernel AND run = :run"
        claims = [{"kernel": kernel, "run": run} for kernel, run in list(self._own_claims.items())]
        if claims:
            self._database.write(lambda transaction: transaction.execute_many(query, claims))

    def _renew_periodically(self) -> None:
        """Renew this process's claims periodically until `close` is called (thread target)."""
        while not self._stop.wait(self._database.lease_s / _HEARTBEATS_PER_LEASE):
            # A failure is reported by the collector's next write; the next heartbeat may succeed.
            with contextlib.suppress(TilewiseError):
                self.renew()

    def close(self) -> None:
        """Stop renewing claims."""
        self._stop.set()


def _process_identity() -> tuple[str, int, str]:
    """Return (host, process id, start time) of this process, which identify it across machines and reboots."""
    return _host_identity(), os.getpid(), _start_time(os.getpid())


@functools.cache
def _host_identity() -> str:
    """Return hostname, boot id and PID namespace; process ids are comparable only if all of them are equal."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return os.uname().nodename
    return f"{os.uname().nodename} {boot} {namespace}"


def _process_exists(process: int) -> bool:
    """Tell whether a process with this id exists, even if /proc hides it or is missing."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # another user's
        pass
    return True


def _start_time(process: int) -> str:
    """Return a process's start time in clock ticks, which tells apart processes with equal ids; "" if unknown."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return ""
