"""One thread writes; requests that come together are committed together, and answered when they are on the disk.

A commit costs a wait for the disk, whatever it holds. While one is under way the next requests gather, so the number of
entries a second does not depend on how slow the disk is.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tilewise.errors import TilewiseError, UnavailableError
from tilewise_arena.board import Board, Transaction

Change = Callable[[Transaction], Any]
_MOST_TOGETHER = 128
_MOST_WAITING = 5000


class Writer:
    """Takes changes from any thread."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._waiting: queue.Queue[tuple[Change, Future[Any]] | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="board-writer", daemon=True)
        self._thread.start()

    def put(self, change: Change) -> Future[Any]:
        """Have `change(transaction)` carried out; the future is done when its effect is on the disk."""
        future: Future[Any] = Future()
        try:
            self._waiting.put_nowait((change, future))
        except queue.Full:
            raise Busy("the board has more requests waiting than it can take; try again in a moment") from None
        return future

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join(10)

    def _run(self) -> None:
        while True:
            batch = self._gather()
            if batch is None:
                return
            self._commit(batch)

    def _gather(self) -> list[tuple[Change, Future[Any]]] | None:
        first = self._waiting.get()
        if first is None:
            return None
        batch = [first]
        while len(batch) < _MOST_TOGETHER:
            try:
                following = self._waiting.get_nowait()
            except queue.Empty:
                break
            if following is None:
                self._waiting.put(None)
                break
            batch.append(following)
        return batch

    def _commit(self, batch: list[tuple[Change, Future[Any]]]) -> None:
        results: list[tuple[Future[Any], Any, BaseException | None]] = []
        try:
            with self._board.write() as transaction:
                for change, future in batch:
                    try:
                        with transaction.part():
                            found = change(transaction)
                        results.append((future, found, None))
                    except TilewiseError as error:
                        results.append((future, None, error))
        except Exception as error:
            sentence = str(error) if isinstance(error, TilewiseError) else "the board did not take the change"
            results = [(future, None, UnavailableError(sentence)) for _, future in batch]
        for future, found, refused in results:
            if refused is None:
                future.set_result(found)
            else:
                future.set_exception(refused)


class Busy(UnavailableError):
    """More work than can be taken now."""
