"""Connections of strangers: at most so many, and none that keeps the board waiting.

uvicorn waits for ever for the first byte of a request and for a client that does not read its answer. Here a connection
has some seconds to send the head of its request and to take what is written to it. When there are more connections than
the board holds, those that have kept it waiting longest are closed to make room: a thousand idle ones push out each
other, not those that ask for something. That is looked at a moment later, so that whoever has just come is heard. A
connection costs little until something is asked on it, and few are taken at a time, so that a flood of them does not
hold up requests that are here already.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 512
MOST_FOR_A_MOMENT = 1024
MOST_AT_THE_DOOR = 1024  # connections that have not asked for anything yet
AT_A_TIME = 64  # connections taken between two looks at what is asked on others
SECONDS_TO_BE_HEARD, SECONDS_BETWEEN = 0.25, 0.01
HEADER_BYTES = 16 << 10
SECONDS_FOR_HEAD = 10.0
SECONDS_TO_TAKE = 30.0


class GuardedProtocol(H11Protocol):
    """HTTP/1.1 with a limit on connections and on their patience."""

    _timer: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None
    _since: float = 0.0
    heard: bytes = b""  # what came before this protocol was there

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = time.monotonic()
        self._expect_head()
        if len(self.connections) > MOST_FOR_A_MOMENT:
            _close_some(self.connections)
        elif len(self.connections) == MOST_CONNECTIONS + 1:
            self.loop.call_later(SECONDS_TO_BE_HEARD, _make_room, self.loop, self.connections)
        if self.heard:
            self.data_received(self.heard)

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


class Door:
    """Connections on which nothing whole has been asked yet: a socket each, and what was heard so far.

    Whoever asks for the board's health is answered here. The oldest are closed when there are too many.
    """

    def __init__(
        self, listening: socket.socket, make: Callable[[], asyncio.Protocol], health: Callable[[], bytes | None]
    ) -> None:
        self._listening, self._make, self._health = listening, make, health
        self._waiting: dict[socket.socket, float] = {}  # since when; the oldest first
        self._heard: dict[socket.socket, bytes] = {}  # the beginning of a head
        self._admitted: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._listening.setblocking(False)
        self._loop.add_reader(self._listening, self._take_some)

    def close(self) -> None:
        self._loop.remove_reader(self._listening)
        self._listening.close()
        for connection in list(self._waiting):
            self._send_away(connection)

    def _take_some(self) -> None:
        """A few of those who stand in the kernel's queue; the loop comes back while there are more."""
        for _ in range(AT_A_TIME):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            except OSError:  # no descriptor is left: the oldest makes room
                self._send_away(next(iter(self._waiting), None))
                return
            connection.setblocking(False)
            self._loop.add_reader(connection, self._hear, connection)
            self._wait_for(connection)

    def _wait_for(self, connection: socket.socket) -> None:
        now = time.monotonic()
        self._waiting[connection] = now
        if len(self._waiting) > MOST_AT_THE_DOOR:
            self._send_away(next(iter(self._waiting)))
        for _ in range(2):  # two go for one that comes, so nobody stays long beyond their time
            oldest = next(iter(self._waiting))
            if now - self._waiting[oldest] > SECONDS_FOR_HEAD:
                self._send_away(oldest)

    def _hear(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._send_away(connection)
            return
        data = self._heard.pop(connection, b"") + data
        if b"\r\n\r\n" not in data and len(data) <= HEADER_BYTES:
            self._heard[connection] = data
            return
        answer = self._health() if _asks_for_health(data) else None
        if answer is not None and self._tell(connection, answer):
            self._waiting.pop(connection, None)
            if b"\nconnection: close" in data.lower():
                self._send_away(connection)
            else:
                self._wait_for(connection)
            return
        self._loop.remove_reader(connection)
        self._waiting.pop(connection, None)
        task = self._loop.create_task(self._admit(connection, data))
        self._admitted.add(task)
        task.add_done_callback(self._admitted.discard)

    @staticmethod
    def _tell(connection: socket.socket, answer: bytes) -> bool:
        with contextlib.suppress(OSError):  # a client that does not take so little has its answer elsewhere, or none
            return connection.send(answer) == len(answer)
        return False

    async def _admit(self, connection: socket.socket, data: bytes) -> None:
        """Hand a connection and what came on it to the server."""
        protocol = self._make()
        if isinstance(protocol, GuardedProtocol):
            protocol.heard = data
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, connection)
        except OSError:
            connection.close()

    def _send_away(self, connection: socket.socket | None) -> None:
        if connection is not None:
            self._loop.remove_reader(connection)
            self._waiting.pop(connection, None)
            self._heard.pop(connection, None)
            connection.close()


_MORE_TO_COME = (b"\ncontent-length:", b"\ntransfer-encoding:", b"\nexpect:", b"\nupgrade:")


def _asks_for_health(data: bytes) -> bool:
    """Whether this is one whole request for /health, without a body."""
    head = data.startswith(b"GET /health HTTP/1.1\r\n") and data.endswith(b"\r\n\r\n")
    rest = data.lower()
    return head and rest.count(b"\r\n\r\n") == 1 and not any(name in rest for name in _MORE_TO_COME)


class GuardedServer(uvicorn.Server):
    """uvicorn behind a door of its own: it hears of a connection when something is asked on it."""

    def __init__(self, config: uvicorn.Config, listening: socket.socket, health: Callable[[], bytes | None]) -> None:
        super().__init__(config)
        self._door = Door(listening, self._protocol, health)

    def _protocol(self) -> asyncio.Protocol:
        settings = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
        return self.config.http_protocol_class(**settings)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._door.open()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._door.close()
        await super().shutdown(sockets)


def _make_room(loop: asyncio.AbstractEventLoop, connections: Any) -> None:
    """Close some connections now, and more a moment later while there are too many."""
    if len(connections) > MOST_CONNECTIONS:
        _close_some(connections)
        loop.call_later(SECONDS_BETWEEN, _make_room, loop, connections)


def _close_some(connections: Any) -> None:
    """Close a few of the connections that have been waited for longest; each costs a little when it ends."""
    waiting = [c for c in connections if isinstance(c, GuardedProtocol) and c.waits_for_client()]
    for oldest in heapq.nsmallest(32, waiting, key=lambda c: c.waiting_since):
        connections.discard(oldest)
        oldest.transport.abort()


def allow_files(count: int = 8 * MOST_CONNECTIONS) -> None:
    """Let this process hold as many connections as it says it does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
