"""The one thread that talks to the store, so that the event loop never waits for a disk or a network.

A SQLite connection belongs to the thread that made it, and a store that is away for a moment is waited for here.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from tilewise.errors import TilewiseError, UnavailableError
from tilewise.store.store import Store

T = TypeVar("T")
_MOST_WAITING = 2000


class Desk:
    """Takes work from any thread; a future is done when what it did is in the store."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._waiting: queue.Queue[tuple[Callable[[Store], Any], Future[Any]] | None] = queue.Queue(_MOST_WAITING)
        self._opened: Future[str] = Future()
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()
        self.name = self._opened.result()  # raises what kept the store from opening

    def put(self, work: Callable[[Store], T]) -> Future[T]:
        future: Future[T] = Future()
        try:
            self._waiting.put_nowait((work, future))
        except queue.Full:
            raise UnavailableError("more is waiting for the store than can be taken; try again in a moment") from None
        return future

    @property
    def backlog(self) -> int:
        return self._waiting.qsize()

    def close(self) -> None:
        """Finish what is waiting, and let go of the store."""
        self._waiting.put(None)
        self._thread.join(30)

    def _run(self) -> None:
        try:
            store = Store(self.where)
        except BaseException as error:
            self._opened.set_exception(error)
            return
        self._opened.set_result(store.name)
        with store:
            while (item := self._waiting.get()) is not None:
                work, future = item
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    future.set_result(work(store))
                except TilewiseError as error:
                    future.set_exception(error)
                except Exception as error:  # whatever it is, the next one wants its turn
                    future.set_exception(UnavailableError(f"the store could not do that ({type(error).__name__})"))
