"""Child processes that may hang or die without taking the collector along.

A worker is a spawned process with one pipe. The parent sends it a task and later asks `wait_any` which workers have
answered, died or run past their limit; a dead one is replaced by a fresh one at the next task.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

_spawn = multiprocessing.get_context("spawn")


class Worker:
    """One process running `serve(connection, *arguments)`."""

    def __init__(self, serve: Callable[..., None], *arguments: Any) -> None:
        self._serve, self._arguments = serve, arguments
        self._process: Any = None
        self._connection: Connection[Any, Any] | None = None
        self.task: Any = None
        self.deadline = float("inf")
        self.deaths = 0

    def start(self) -> None:
        """Have the process running, so that its imports are done when the first task comes."""
        if self._process is None:
            ours, theirs = _spawn.Pipe()
            self._process = _spawn.Process(target=_live, args=(self._serve, theirs, *self._arguments), daemon=True)
            with _deaf_to_interrupts():
                self._process.start()
            theirs.close()
            self._connection = ours

    def submit(self, task: Any, seconds: float) -> None:
        """Hand over a task that must answer, or report progress, within `seconds`."""
        self.start()
        assert self._connection is not None
        self.task = task
        self.deadline = time.monotonic() + seconds
        with contextlib.suppress(OSError):  # it died while idle; wait_any will say so
            self._connection.send(task)

    def submit_silently(self, seconds: float) -> None:
        """Start the process and wait for a first message that it sends of its own accord."""
        self.start()
        self.task, self.deadline = "start", time.monotonic() + seconds

    def extend(self, seconds: float) -> None:
        """The task made progress: count its limit from now."""
        self.deadline = time.monotonic() + seconds

    @property
    def busy(self) -> bool:
        return self.task is not None

    def finish(self) -> None:
        """The task is answered."""
        self.task, self.deadline = None, float("inf")

    def receive(self) -> Any:
        """The next message; EOFError if the process is gone."""
        assert self._connection is not None
        try:
            return self._connection.recv()
        except (OSError, EOFError) as error:
            raise EOFError from error

    def ready(self) -> bool:
        """Whether a message, or the news of its end, is there already."""
        return self._connection is not None and self._connection.poll()

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        if self._process is not None:
            self._process.kill()
            self._process.join(10)
            if self._connection is not None:
                self._connection.close()
            self._process, self._connection = None, None
        self.finish()

    @property
    def connection(self) -> Connection[Any, Any] | None:
        return self._connection


def _live(serve: Callable[..., None], connection: Any, *arguments: Any) -> None:
    """A worker's life, which ends without a word when the parent is gone."""
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve(connection, *arguments)


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """A process started within does not hear Ctrl-C: the parent does, and ends it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class WorkerLostError(Exception):
    """What `wait_any` hands out in place of a message when a worker died or ran past its limit."""


def wait_any(workers: Sequence[Worker], seconds: float) -> list[tuple[Worker, Any]]:
    """Messages that have come, at most one a worker. A lost worker is stopped and gives a WorkerLostError."""
    busy = {worker.connection: worker for worker in workers if worker.busy and worker.connection is not None}
    found: list[tuple[Worker, Any]] = []
    for connection in wait(list(busy), timeout=seconds):
        worker = busy[connection]  # type: ignore[index]
        try:
            found.append((worker, worker.receive()))
        except EOFError:
            found.append((worker, _lose(worker, "its process died")))
    answered = {id(worker) for worker, _ in found}
    now = time.monotonic()
    for worker in busy.values():
        if id(worker) not in answered and now > worker.deadline:
            found.append((worker, _lose(worker, "it ran past its time limit")))
    return found


def _lose(worker: Worker, reason: str) -> WorkerLostError:
    task = worker.task
    worker.stop()
    worker.deaths += 1
    worker.task = task  # the caller wants to know what it was busy with, and calls finish()
    return WorkerLostError(reason)
