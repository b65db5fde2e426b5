"""The measuring processes of a server: started with it, started again when they die, ended with it.

A worker that dies puts nothing back by itself, so the entry it was at is put back here, at once. On a machine with
cores to spare the server keeps to the first one and leaves the others to the workers: people who look at pages do not
make an entry that is being measured look slow.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewise._system import child_environment
from tilewise.errors import TilewiseError
from tilewise_arena.board import open_board
from tilewise_arena.worker import new_name

log = logging.getLogger("tilewise.workers")
MODULE = ("tilewise_arena.worker",)
_LOOK_SECONDS = 0.5
_LONGEST_PAUSE = 60.0
_SECONDS_TO_END = 2.0


@dataclass
class WorkerProcess:
    """A worker process, with the number of earlier ones that died in its place."""

    name: str
    process: subprocess.Popen[bytes]
    started: float
    deaths: int = 0
    again_at: float = 0.0  # when a dead one is started again


class Workers:
    """Runs `count` worker processes over one board, and restarts those that die."""

    def __init__(self, count: int, where: str, threads: int, settings: Mapping[str, Any], key: Path | None) -> None:
        """Start `count` workers with these settings, and the thread that watches them."""
        self._where, self._key = where, key
        self._words = [where, str(threads), json.dumps(settings), str(key or "")]
        self._ending = threading.Event()
        self._cores = share_cores(count * threads) if count else None
        self._workers = [self._start(0) for _ in range(count)]
        self._thread = threading.Thread(target=self._watch, name="workers", daemon=True)
        self._thread.start()

    def alive(self) -> int:
        return sum(worker.process.poll() is None for worker in self._workers)

    def close(self) -> None:
        """Ask all workers to stop, and kill those that do not."""
        self._ending.set()
        self._thread.join(5)
        for worker in self._workers:
            _signal(worker.process, signal.SIGTERM)
        deadline = time.monotonic() + _SECONDS_TO_END
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(deadline - time.monotonic(), 0.01))
            _signal(worker.process, signal.SIGKILL)
            worker.process.wait()
            self._put_back(worker.name)

    def _start(self, deaths: int) -> WorkerProcess:
        """Start a worker process on its cores; `deaths` counts its predecessors that died."""
        name = new_name()
        command = [sys.executable, "-m", *MODULE, *self._words, name]
        process = subprocess.Popen(command, start_new_session=True, env=os.environ | child_environment())
        if self._cores is not None:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(process.pid, self._cores)
        return WorkerProcess(name, process, time.monotonic(), deaths)

    def _watch(self) -> None:
        """Restart each worker that has ended, until the server shuts down."""
        while not self._ending.wait(_LOOK_SECONDS):
            for index, worker in enumerate(self._workers):
                if worker.process.poll() is not None:
                    self._restart(index, worker)

    def _restart(self, index: int, dead: WorkerProcess) -> None:
        """Release a dead worker's jobs and start another, after a growing pause if it died early."""
        now = time.monotonic()
        if not dead.again_at:
            log.warning("worker %s ended with code %s", dead.name, dead.process.returncode)
            _signal(dead.process, signal.SIGKILL)  # its measuring process
            self._put_back(dead.name)
            short = now - dead.started < 30
            dead.deaths = dead.deaths + 1 if short else 0
            dead.again_at = now + (min(0.5 * 2**dead.deaths, _LONGEST_PAUSE) if short else 0.0)
        if now >= dead.again_at:
            self._workers[index] = self._start(dead.deaths)

    def _put_back(self, name: str) -> None:
        """Put the entry that a dead worker was measuring back into the queue."""
        try:
            with open_board(self._where, create=False, key=self._key) as board, board.write() as transaction:
                transaction.release(name)
        except TilewiseError as error:
            log.warning("what worker %s was at stays with it for now: %s", name, error)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a worker and to the measuring process that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def share_cores(count: int) -> Sequence[int] | None:
    """Pin this process to one core and return the others; None if there are fewer than `count` others."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    mine, *others = sorted(os.sched_getaffinity(0))
    if len(others) < count:
        return None
    os.sched_setaffinity(0, {mine})
    return others
