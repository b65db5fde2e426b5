"""Child processes that may hang or die without stopping their parent.

A worker is a spawned process with one pipe. The parent submits a task and later calls `wait_any` to learn which workers
have replied, died or exceeded their time limit. A dead worker is restarted for its next task.
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
        """Store what the process will run; it is started by the first task."""
        self._serve, self._arguments = serve, arguments
        self._process: Any = None
        self._connection: Connection[Any, Any] | None = None
        self.task: Any = None
        self.deadline = float("inf")
        self.deaths = 0

    def start(self) -> None:
        """Start the process if it is not running; starting early hides the cost of its imports."""
        if self._process is None:
            ours, theirs = _spawn.Pipe()
            self._process = _spawn.Process(target=_serve, args=(self._serve, theirs, *self._arguments), daemon=True)
            with _ignored_interrupts():
                self._process.start()
            theirs.close()
            self._connection = ours

    def submit(self, task: Any, seconds: float) -> None:
        """Send a task to the process, which must reply or report progress within `seconds`."""
        self.start()
        assert self._connection is not None
        self.task = task
        self.deadline = time.monotonic() + seconds
        with contextlib.suppress(OSError):  # the worker died while idle; wait_any will report it
            self._connection.send(task)

    def submit_silently(self, seconds: float) -> None:
        """Start the process and wait for its first message, which needs no task, for at most `seconds`."""
        self.start()
        self.task, self.deadline = "start", time.monotonic() + seconds

    def extend(self, seconds: float) -> None:
        """Restart the time limit of the current task, which has reported progress."""
        self.deadline = time.monotonic() + seconds

    @property
    def busy(self) -> bool:
        return self.task is not None

    def finish(self) -> None:
        """Mark the current task as completed."""
        self.task, self.deadline = None, float("inf")

    def receive(self) -> Any:
        """Receive the next message; EOFError if the process has died."""
        assert self._connection is not None
        try:
            return self._connection.recv()
        except (OSError, EOFError) as error:
            raise EOFError from error

    def ready(self) -> bool:
        """Tell whether `receive` would return or raise without waiting."""
        return self._connection is not None and self._connection.poll()

    def stop(self) -> None:
        """Kill the process."""
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


def _serve(serve: Callable[..., None], connection: Any, *arguments: Any) -> None:
    """Main function of the child process: run `serve`; end silently if the parent has exited."""
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve(connection, *arguments)


@contextlib.contextmanager
def _ignored_interrupts() -> Iterator[None]:
    """Make processes that are started inside the block ignore SIGINT: on Ctrl-C the parent stops them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)


class WorkerLostError(Exception):
    """A worker died or exceeded its time limit; `wait_any` returns it in place of a message."""


def wait_any(workers: Sequence[Worker], seconds: float) -> list[tuple[Worker, Any]]:
    """Wait up to `seconds` for messages of several workers; return at most one per worker.

    A worker that died or exceeded its time limit is stopped, and its message is a WorkerLostError.
    """
    busy = {worker.connection: worker for worker in workers if worker.busy and worker.connection is not None}
    messages: list[tuple[Worker, Any]] = []
    for connection in wait(list(busy), timeout=seconds):
        worker = busy[connection]  # type: ignore[index]
        try:
            messages.append((worker, worker.receive()))
        except EOFError:
            messages.append((worker, _mark_lost(worker, "its process died")))
    answered = {id(worker) for worker, _ in messages}
    now = time.monotonic()
    for worker in busy.values():
        if id(worker) not in answered and now > worker.deadline:
            messages.append((worker, _mark_lost(worker, "it ran past its time limit")))
    return messages


def _mark_lost(worker: Worker, reason: str) -> WorkerLostError:
    """Stop a worker and return the error; its task stays set, so that the caller can see what was lost."""
    task = worker.task
    worker.stop()
    worker.deaths += 1
    worker.task = task
    return WorkerLostError(reason)
