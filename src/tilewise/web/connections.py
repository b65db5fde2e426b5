"""Connections of strangers: at most so many, and none that keeps the board waiting.

uvicorn waits for ever for the first byte of a request and for a client that does not read its answer. Here a connection
has some seconds to send the head of its request and to take what is written to it. When there are more connections than
the board holds, those that have kept it waiting longest are closed to make room: a thousand idle ones push out each
other, not those that ask for something. That is looked at a moment later, so that whoever has just come is heard. A
connection costs little until something is asked on it, and few are taken at a time, so that a flood of them does not
hold up requests that are here already. A head is looked at before it is parsed: so many lines, and no body in chunks,
which can be made of single bytes. One request at a time is heard on a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import re
import resource
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 512
MOST_FOR_A_MOMENT = 1024
MOST_AT_THE_DOOR = 1024  # connections that have not asked for anything yet
AT_A_TIME = 64  # connections taken between two looks at what is asked on others
LET_IN_AT_A_TIME = 8  # of those that have asked; each costs as much as a hundred that have not
SECONDS_TO_BE_HEARD, SECONDS_BETWEEN = 0.25, 0.01
HEADER_BYTES, HEADER_LINES, HEADER_PARTS = 16 << 10, 100, 300
_END_OF_HEAD = re.compile(rb"\n\r?\n")
SECONDS_FOR_HEAD = 10.0
SECONDS_TO_TAKE = 30.0


class GuardedProtocol(H11Protocol):
    """HTTP/1.1 with a limit on connections and on their patience."""

    _timer: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None
    _since: float = 0.0
    heard: bytes = b""  # what came before this protocol was there

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._head = bytearray()
        self._early = False  # whether something came while nothing was to be said

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
        if not fresh and not self.cycle.more_body:  # asked before the answer was out: it is not looked at
            self._early = True
            self.flow.pause_reading()
            return
        if fresh and not self._may_be_parsed(data):
            return
        super().data_received(data)
        if fresh and not self._waits_for_head():
            self._forget_head()

    def _may_be_parsed(self, data: bytes) -> bool:
        """Whether what was sent of a head so far is one that costs little; the others are answered here."""
        before = max(len(self._head) - 2, 0)
        self._head += data
        found = _END_OF_HEAD.search(self._head, before)
        if found is None and len(self._head) <= HEADER_BYTES:
            return True
        head = bytes(self._head[: found.start()] if found else self._head).lower()
        self._head.clear()
        if head.count(b"\n") >= HEADER_LINES:
            self._turn_away(b"431 Request Header Fields Too Large", b"a head has %d lines at most" % HEADER_LINES)
        elif head.count(b";") > HEADER_PARTS:  # cookies, which are taken apart one by one
            self._turn_away(b"431 Request Header Fields Too Large", b"a head has %d cookies at most" % HEADER_PARTS)
        elif b"\ntransfer-encoding" in head:
            self._turn_away(b"411 Length Required", b"a body comes whole and with its length, not in chunks")
        return not self.transport.is_closing()

    def _turn_away(self, status: bytes, sentence: bytes) -> None:
        kind = b"content-type: text/plain\r\nconnection: close\r\ncontent-length: %d" % len(sentence)
        self.transport.write(b"HTTP/1.1 %s\r\n%s\r\n\r\n%s" % (status, kind, sentence))
        self.transport.close()

    def on_response_complete(self) -> None:
        self._since = time.monotonic()
        if self._early or self.conn.trailing_data[0]:
            self.transport.close()
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
        self._asking: deque[tuple[socket.socket, bytes]] = deque()  # in the order they are let in
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
        while self._asking:
            self._asking.popleft()[0].close()

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
        if not self._asking:
            self._loop.call_soon(self._let_some_in)
        self._asking.append((connection, data))
        if len(self._asking) > MOST_AT_THE_DOOR:
            self._asking.popleft()[0].close()

    def _let_some_in(self) -> None:
        """A few of those who have asked, between two looks at who else has come."""
        for _ in range(min(LET_IN_AT_A_TIME, len(self._asking))):
            connection, data = self._asking.popleft()
            if _is_gone(connection):
                connection.close()
                continue
            task = self._loop.create_task(self._admit(connection, data))
            self._admitted.add(task)
            task.add_done_callback(self._admitted.discard)
        if self._asking:
            self._loop.call_soon(self._let_some_in)

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


def _is_gone(connection: socket.socket) -> bool:
    """Whether nobody is there any more to take an answer; who has only stopped sending still is."""
    try:
        connection.recv(1, socket.MSG_PEEK)
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True
    return False


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

    def end_when_told(self) -> None:
        """Let SIGTERM and Ctrl-C end it from now on, before it runs too.

        Nothing is raised: what a signal raises while Python clears up an object is dropped, and the server would stay.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._told)

    def _told(self, *_: object) -> None:
        self.should_exit = True

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
