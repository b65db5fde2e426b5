"""The one thread that uses the store, so that the event loop never waits for a disk or a network.

A SQLite connection belongs to the thread that created it. If the database is unavailable, only this thread waits.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from tilewise.errors import TilewiseError, UnavailableError
from tilewise.store.database import is_url
from tilewise.store.store import Store

T = TypeVar("T")
_MAX_BACKLOG = 2000  # requests; arbitrary
# A database server may start later than the service, for example after a power failure.
# The service waits this long for it, with pauses that double from the first to the longest. All arbitrary.
_OPEN_SECONDS, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 300.0, 0.5, 15.0


class StoreThread:
    """A thread that owns the store and runs submitted functions on it, in order."""

    def __init__(self, where: str) -> None:
        """Start the thread and wait until the store is open; raise the error if it cannot be opened."""
        self.where = where
        self._requests: queue.Queue[tuple[Callable[[Store], Any], Future[Any]] | None] = queue.Queue(_MAX_BACKLOG)
        self._store_name: Future[str] = Future()
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()
        self.name = self._store_name.result()

    def submit(self, work: Callable[[Store], T]) -> Future[T]:
        """Queue `work(store)` for the thread; the future completes when its changes are committed."""
        future: Future[T] = Future()
        try:
            self._requests.put_nowait((work, future))
        except queue.Full:
            raise UnavailableError("too many requests are waiting for the store; try again in a moment") from None
        return future

    @property
    def backlog(self) -> int:
        """Number of queued functions."""
        return self._requests.qsize()

    def close(self) -> None:
        """Run what is queued, then close the store."""
        self._requests.put(None)
        self._thread.join(30)

    def _run(self) -> None:
        """Open the store and run queued functions until `close` (thread target); failures do not end it."""
        try:
            store = _open_store(self.where)
        except BaseException as error:
            self._store_name.set_exception(error)
            return
        self._store_name.set_result(store.name)
        with store:
            while (item := self._requests.get()) is not None:
                work, future = item
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    future.set_result(work(store))
                except TilewiseError as error:
                    future.set_exception(error)
                except Exception as error:  # of any kind: the thread must go on with the next request
                    future.set_exception(UnavailableError(f"the store could not do that ({type(error).__name__})"))


def _open_store(where: str) -> Store:
    """Open a store; wait for a database server that does not answer yet, with exponential backoff."""
    deadline, pause = time.monotonic() + _OPEN_SECONDS, _FIRST_PAUSE_SECONDS
    while True:
        try:
            return Store(where)
        except UnavailableError as error:
            if not is_url(where) or time.monotonic() + pause > deadline:
                raise
            print(f"{error} Trying again in {pause:g} s.", file=sys.stderr, flush=True)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
