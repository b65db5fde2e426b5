"""Connections of strangers: at most so many, and none that keeps the board waiting.

uvicorn waits for ever for the first byte of a request and for a client that does not read its answer. Here a connection
has some seconds to send the head of its request and to take what is written to it. When there are more connections than
the board holds, the one that has kept it waiting longest is closed to make room: a thousand idle ones push out each
other, not those that ask for something.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 512
HEADER_BYTES = 16 << 10
SECONDS_FOR_HEAD = 10.0
SECONDS_TO_TAKE = 30.0


class GuardedProtocol(H11Protocol):
    """HTTP/1.1 with a limit on connections and on their patience."""

    _timer: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None
    _since: float = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = time.monotonic()
        self._expect_head()
        if len(self.connections) > MOST_CONNECTIONS:
            _make_room(self.connections)

    def data_received(self, data: bytes) -> None:
        fresh = self._waits_for_head()
        super().data_received(data)
        if fresh and not self._waits_for_head():
            self._forget_head()

    def on_response_complete(self) -> None:
        self._since = time.monotonic()
        super().on_response_complete()
        if self._waits_for_head():
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        self._end_stuck()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck = self._stuck or self.loop.call_later(SECONDS_TO_TAKE, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_stuck()

    def waits_for_client(self) -> bool:
        """Whether it is the client's turn: nothing asked, or a request whose body is not here yet."""
        return self._waits_for_head() or bool(self.cycle.more_body)

    @property
    def waiting_since(self) -> float:
        return self._since

    def _waits_for_head(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    def _expect_head(self) -> None:
        self._forget_head()
        self._timer = self.loop.call_later(SECONDS_FOR_HEAD, self._too_late)

    def _too_late(self) -> None:
        if self._waits_for_head():
            self.transport.close()

    def _forget_head(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_stuck(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None


def _make_room(connections: Any) -> None:
    """Close the connection that has been waited for longest."""
    waiting = [c for c in connections if isinstance(c, GuardedProtocol) and c.waits_for_client()]
    for oldest in sorted(waiting, key=lambda c: c.waiting_since)[: len(connections) - MOST_CONNECTIONS]:
        connections.discard(oldest)
        oldest.transport.abort()


def allow_files(count: int = 4 * MOST_CONNECTIONS) -> None:
    """Let this process hold as many connections as it says it does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
