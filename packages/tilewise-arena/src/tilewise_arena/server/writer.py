"""The one thread that writes to the board: group commit of concurrent requests.

Every commit waits for the disk, however small it is. Requests that arrive during a commit are gathered and committed
together, so the rate of entries does not depend on the speed of the disk. A request is answered after its commit.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tilewise.errors import TilewiseError, UnavailableError
from tilewise_arena.board import Board, BoardTransaction

Change = Callable[[BoardTransaction], Any]
_MAX_BATCH = 128  # requests per commit; arbitrary
_MAX_WAITING = 5000  # requests; arbitrary


class BoardWriter:
    """A thread that commits queued changes to the board, several in one transaction."""

    def __init__(self, board: Board) -> None:
        """Start the thread that writes to `board`."""
        self._board = board
        self._waiting: queue.Queue[tuple[Change, Future[Any]] | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="board-writer", daemon=True)
        self._thread.start()

    def put(self, work: Change) -> Future[Any]:
        """Queue `work(transaction)`; the future completes when its changes are committed."""
        future: Future[Any] = Future()
        try:
            self._waiting.put_nowait((work, future))
        except queue.Full:
            raise Busy("too many requests are waiting for the board; try again in a moment") from None
        return future

    def close(self) -> None:
        """Commit what is queued and stop the thread; waits at most 10 seconds."""
        self._waiting.put(None)
        self._thread.join(10)

    def _run(self) -> None:
        """Commit batches of changes until `close` is called (thread target)."""
        while True:
            batch = self._gather()
            if batch is None:
                return
            self._commit(batch)

    def _gather(self) -> list[tuple[Change, Future[Any]]] | None:
        """Wait for a change; return it with all others queued by then, or None after `close`."""
        first = self._waiting.get()
        if first is None:
            return None
        batch = [first]
        while len(batch) < _MAX_BATCH:
            try:
                item = self._waiting.get_nowait()
            except queue.Empty:
                break
            if item is None:
                self._waiting.put(None)
                break
            batch.append(item)
        return batch

    def _commit(self, batch: list[tuple[Change, Future[Any]]]) -> None:
        """Commit a batch of changes in one transaction; one that is rejected does not affect the others."""
        results: list[tuple[Future[Any], Any, BaseException | None]] = []
        try:
            with self._board.write() as transaction:
                for work, future in batch:
                    try:
                        with transaction.part():
                            value = work(transaction)
                        results.append((future, value, None))
                    except TilewiseError as error:
                        results.append((future, None, error))
        except Exception as error:
            sentence = str(error) if isinstance(error, TilewiseError) else "the board could not store the change"
            results = [(future, None, UnavailableError(sentence)) for _, future in batch]
        for future, value, failure in results:
            if failure is None:
                future.set_result(value)
            else:
                future.set_exception(failure)


class Busy(UnavailableError):
    """Too many requests are waiting."""
