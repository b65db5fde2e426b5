"""Health checks of a service's database that many clients share: one query at a time, and its last result at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from tilewise.errors import UnavailableError

_INTERVAL_SECONDS = 0.1  # checks within this time share one query; arbitrary
_TIMEOUT_SECONDS = 3.0  # a database that takes longer counts as dead; arbitrary
_RECENT_SECONDS = 2.0  # how long a result is good enough for an answer without waiting; arbitrary


class Pulse:
    """Caches a database's health for many clients; `start_query` begins a query, `describe` formats its result."""

    def __init__(
        self, start_query: Callable[[], asyncio.Future[Any]], describe: Callable[[Any], dict[str, Any]]
    ) -> None:
        """Store both functions; no query is made yet."""
        self._start_query, self._describe = start_query, describe
        self._query: asyncio.Future[Any] | None = None
        self._query_time = 0.0
        self._last_result: tuple[float, Any] = (-1e9, None)  # time and result of the last query that succeeded

    async def check(self) -> dict[str, Any]:
        """Wait for the result of a query; UnavailableError if the database does not answer in time."""
        try:
            result = await asyncio.wait_for(asyncio.shield(self._current_query()), _TIMEOUT_SECONDS)
        except Exception:  # any failure of the database means the same here
            raise UnavailableError("the database does not answer") from None
        self._last_result = (time.monotonic(), result)
        return self._describe(result)

    def last(self) -> dict[str, Any] | None:
        """Return the last result if it is recent, else None; an old one is refreshed in the background."""
        query = self._current_query()
        if query.done() and not query.cancelled() and query.exception() is None:
            self._last_result = (max(self._last_result[0], self._query_time), query.result())
        when, result = self._last_result
        return self._describe(result) if time.monotonic() - when < _RECENT_SECONDS else None

    def _current_query(self) -> asyncio.Future[Any]:
        """Return the query in progress; start a new one if the last one is old."""
        now = time.monotonic()
        if self._query is None or (self._query.done() and now - self._query_time > _INTERVAL_SECONDS):
            self._query_time = now
            self._query = self._start_query()
        return self._query
