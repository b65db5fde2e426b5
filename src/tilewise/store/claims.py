"""Who measures what: a kernel is claimed before it is measured, so that several collectors share one store.

A claim counts while its process lives; of a process on another machine that is known by its beats: on a shared store a
thread renews the claims of this process, and one that was not renewed within the lease is free again. Whoever lost a
claim that way (a machine that slept, a cable that was pulled) is told at its next write and writes nothing: what the
new holder measures is not mixed with it. `next` takes the first kernel of the queue that nobody holds; on PostgreSQL
those that others are taking at this moment are skipped, not waited for.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

from tilewise.errors import TilewiseError
from tilewise.store.home import Home, Rows

_BEATS_A_LEASE = 5
_CLAIM = """INSERT INTO claim (kernel, run, host, process, born, taken)
    VALUES (:kernel, :run, :host, :process, :born, {now})
    ON CONFLICT (kernel) DO UPDATE SET run = excluded.run, host = excluded.host, process = excluded.process,
    born = excluded.born, taken = excluded.taken"""
_NEXT = """SELECT queue.kernel, kernel.program, kernel.problem FROM queue JOIN kernel ON kernel.id = queue.kernel
    LEFT JOIN claim ON claim.kernel = queue.kernel
    WHERE kernel.part = :part AND (claim.kernel IS NULL OR claim.taken < {now} - :lease)
    ORDER BY queue.priority DESC, queue.id LIMIT 1{skip}"""


class LostClaimError(Exception):
    """Another collector has taken the kernel over; what this one still holds of it must not be written."""


class Claims:
    """The claims of one open store."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._held: dict[int, int] = {}  # kernel to run, of this process
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, rows: Rows, run: int, kernel: int, again: bool) -> bool:
        """Within a transaction: hold `kernel`, unless another does or, unless `again`, it is finished."""
        rows.all(f"SELECT id FROM kernel WHERE id = :kernel{self._home.lock}", {"kernel": kernel})
        if not again and rows.all("SELECT 1 FROM finished WHERE kernel = :kernel LIMIT 1", {"kernel": kernel}):
            return False
        query = f"SELECT host, process, born, {self._home.now} - taken FROM claim WHERE kernel = :kernel"
        held = rows.all(query, {"kernel": kernel})
        if held and tuple(held[0][:3]) != _process() and self._holds(*held[0]):
            return False
        self._write(rows, run, kernel)
        return True

    def next(self, rows: Rows, run: int, part: str) -> tuple[int, Any, Any] | None:
        """Within a transaction: the first waiting kernel that nobody holds, now ours: number, program and problem."""
        query = _NEXT.format(now=self._home.now, skip=self._home.skip)
        while True:
            found = rows.all(query, {"part": part, "lease": self._home.lease_s})
            if not found and not self._free_the_dead(rows):
                return None
            # Whoever had the row locked a moment ago may have claimed it since the question was asked.
            if found and not self._claimed(rows, found[0][0]):
                self._write(rows, run, found[0][0])
                return int(found[0][0]), found[0][1], found[0][2]

    def _claimed(self, rows: Rows, kernel: int) -> bool:
        query = f"SELECT 1 FROM claim WHERE kernel = :kernel AND taken >= {self._home.now} - :lease"
        return bool(rows.all(query, {"kernel": kernel, "lease": self._home.lease_s}))

    def _free_the_dead(self, rows: Rows) -> bool:
        """Give back what ended processes of this machine held; whether there was any."""
        host, _, _ = _process()
        held = rows.all("SELECT kernel, process, born FROM claim WHERE host = :host", {"host": host})
        dead = [kernel for kernel, process, born in held if not born or _born(process) != born]
        for kernel in dead:
            rows.run("DELETE FROM claim WHERE kernel = :kernel", {"kernel": kernel})
        return bool(dead)

    def _write(self, rows: Rows, run: int, kernel: int) -> None:
        host, process, born = _process()
        values = {"kernel": kernel, "run": run, "host": host, "process": process, "born": born}
        rows.run(_CLAIM.format(now=self._home.now), values)

    def _holds(self, host: str, process: int, born: str, age_s: float) -> bool:
        """Whether a claim still counts: its process runs here, or it was renewed within the lease."""
        if host == os.uname().nodename:
            return born != "" and _born(process) == born
        return age_s < self._home.lease_s

    # Of this process

    def hold(self, run: int, kernel: int) -> None:
        """The claim is in the store now."""
        self._held[kernel] = run
        if self._home.shared and self._thread is None:
            self._thread = threading.Thread(target=self._beat_on, name="claims", daemon=True)
            self._thread.start()

    def drop(self, kernel: int) -> None:
        self._held.pop(kernel, None)

    def check(self, rows: Rows, kernel: int) -> None:
        """Within a transaction of a shared store: raise where this process has held the kernel and no longer does."""
        run = self._held.get(kernel)
        if run is None or not self._home.shared:
            return
        query = f"SELECT 1 FROM claim WHERE kernel = :kernel AND run = :run{self._home.lock}"
        if not rows.all(query, {"kernel": kernel, "run": run}):
            raise LostClaimError("another collector has taken this kernel over")

    def release(self, rows: Rows, kernel: int) -> None:
        """Give a claim back; on a shared store only one's own."""
        run = self._held.get(kernel) if self._home.shared else None
        own = "" if run is None else " AND run = :run"
        rows.run(f"DELETE FROM claim WHERE kernel = :kernel{own}", {"kernel": kernel} | ({"run": run} if own else {}))

    def beat(self) -> None:
        """Renew what this process holds."""
        renew = f"UPDATE claim SET taken = {self._home.now} WHERE kernel = :kernel AND run = :run"
        held = [{"kernel": kernel, "run": run} for kernel, run in list(self._held.items())]
        if held:
            self._home.change(lambda rows: rows.many(renew, held))

    def _beat_on(self) -> None:
        while not self._stop.wait(self._home.lease_s / _BEATS_A_LEASE):
            with contextlib.suppress(TilewiseError):  # the next write says so, and the next beat may come through
                self.beat()

    def close(self) -> None:
        self._stop.set()


def _process() -> tuple[str, int, str]:
    return os.uname().nodename, os.getpid(), _born(os.getpid())


def _born(process: int) -> str:
    """When a process started, in kernel ticks: a number that a later process with the same id does not share."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return ""
