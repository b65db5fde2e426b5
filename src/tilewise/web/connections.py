"""Limits on connections: their number, and the time that each may keep the server waiting.

uvicorn waits without limit for the first byte of a request and for a client that does not read its response. Here a
connection has some seconds to send the head of its request, and to read the response.

- If there are too many connections, the server closes those that it has waited for longest. A thousand idle connections
  therefore push out each other, and not clients that send requests. This happens with a short delay, so that a new
  client has time to send its request.
- A connection is only a socket until its request head has arrived, and few connections are accepted per turn of the
  event loop, so that a flood of them does not delay requests that are already being processed.
- A request head is checked before it is parsed: the number of lines is limited, and chunked bodies are rejected,
  because a client can send them in chunks of one byte. Pipelined requests are not accepted.
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

from tilewise.web.limits import Limits

# The limits below are arbitrary; the tests with hostile clients pass with them.
MAX_CONNECTIONS = 512  # with a request; more are closed after a short delay
MAX_CONNECTIONS_BURST = 1024  # with a request; more are closed at once
MAX_PENDING = 1024  # connections without a complete request head
ACCEPTS_PER_TURN = 64  # connections accepted per turn of the event loop
ADMISSIONS_PER_TURN = 8  # connections handed to uvicorn per turn; each costs as much as a hundred accepts
CLOSE_DELAY_SECONDS, CLOSE_INTERVAL_SECONDS = 0.25, 0.01
HEADER_BYTES, HEADER_LINES, HEADER_PARTS = 16 << 10, 100, 300
_END_OF_HEAD = re.compile(rb"\n\r?\n")
HEAD_SECONDS = 10.0  # for sending a request head
READ_SECONDS = 30.0  # for reading a response


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with limits on the number of connections, on request heads and on time."""

    _header_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    waiting_since: float = 0.0
    initial_data: bytes = b""  # received before the connection was handed to this protocol

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._head = bytearray()
        self._pipelined = False  # whether data arrived before the response was complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the request head, and close old connections if there are too many."""
        super().connection_made(transport)
        self.waiting_since = time.monotonic()
        self._start_header_timer()
        if len(self.connections) > MAX_CONNECTIONS_BURST:
            _close_some(self.connections)
        elif len(self.connections) == MAX_CONNECTIONS + 1:
            self.loop.call_later(CLOSE_DELAY_SECONDS, _make_room, self.loop, self.connections)
        if self.initial_data:
            self.data_received(self.initial_data)

    def data_received(self, data: bytes) -> None:
        """Check a request head before it is parsed; data before the response is complete is ignored."""
        fresh = self._waits_for_head()
        if not fresh and not self.cycle.more_body:
            self._pipelined = True
            self.flow.pause_reading()
            return
        if fresh and not self._may_be_parsed(data):
            return
        super().data_received(data)
        if fresh and not self._waits_for_head():
            self._cancel_header_timer()

    def _may_be_parsed(self, data: bytes) -> bool:
        """Tell whether the head so far is small enough to parse; if not, respond with an error."""
        start = max(len(self._head) - 2, 0)  # the end of the head may be split over two packets
        self._head += data
        end = _END_OF_HEAD.search(self._head, start)
        if end is None and len(self._head) <= HEADER_BYTES:
            return True
        head = bytes(self._head[: end.start()] if end else self._head).lower()
        self._head.clear()
        if head.count(b"\n") >= HEADER_LINES:
            self._reject(b"431 Request Header Fields Too Large", b"a head may have %d lines at most" % HEADER_LINES)
        elif head.count(b";") > HEADER_PARTS:  # parsing cookies takes time for each of them
            self._reject(b"431 Request Header Fields Too Large", b"a head may have %d cookies at most" % HEADER_PARTS)
        elif b"\ntransfer-encoding" in head:
            self._reject(b"411 Length Required", b"a request body needs a Content-Length; chunks are not accepted")
        return not self.transport.is_closing()

    def _reject(self, status: bytes, sentence: bytes) -> None:
        """Send a short plain-text response and close the connection."""
        kind = b"content-type: text/plain\r\nconnection: close\r\ncontent-length: %d" % len(sentence)
        self.transport.write(b"HTTP/1.1 %s\r\n%s\r\n\r\n%s" % (status, kind, sentence))
        self.transport.close()

    def on_response_complete(self) -> None:
        """Wait for the next request, with a time limit; close a connection that sent it too early."""
        self.waiting_since = time.monotonic()
        if self._pipelined or self.conn.trailing_data[0]:
            self.transport.close()
        super().on_response_complete()
        if self._waits_for_head():
            self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel both timers and end the connection."""
        self._cancel_header_timer()
        self._cancel_write_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self._write_timer or self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_write_timer()

    def waits_for_client(self) -> bool:
        """Tell whether the server waits for the client's request or the rest of its body."""
        return self._waits_for_head() or bool(self.cycle.more_body)

    def _waits_for_head(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    def _start_header_timer(self) -> None:
        """Close the connection if no complete request header arrives within HEAD_SECONDS."""
        self._cancel_header_timer()
        self._header_timer = self.loop.call_later(HEAD_SECONDS, self._on_header_timeout)

    def _on_header_timeout(self) -> None:
        if self._waits_for_head():
            self.transport.close()

    def _cancel_header_timer(self) -> None:
        """Cancel the time limit for the request's head."""
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _cancel_write_timer(self) -> None:
        """Cancel the time limit for sending the response."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


class PendingConnections:
    """Accepts connections and holds them as plain sockets until a complete request head has arrived."""

    def __init__(
        self, listening: socket.socket, make: Callable[[], asyncio.Protocol], health: Callable[[], bytes | None]
    ) -> None:
        """Store the socket, the factory of protocols, and the function that answers health checks."""
        self._listening, self._make, self._health = listening, make, health
        self._waiting: dict[socket.socket, float] = {}  # time of the last event; the oldest first
        self._partial_heads: dict[socket.socket, bytes] = {}
        self._ready: deque[tuple[socket.socket, bytes]] = deque()  # with a complete head, in order of arrival
        self._admissions: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Start accepting connections in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._listening.setblocking(False)
        self._loop.add_reader(self._listening, self._accept_some)

    def close(self) -> None:
        """Stop accepting, and close all pending connections."""
        self._loop.remove_reader(self._listening)
        self._listening.close()
        for connection in list(self._waiting):
            self._drop(connection)
        while self._ready:
            self._ready.popleft()[0].close()

    def _accept_some(self) -> None:
        """Accept a few connections; called by the event loop while there are more."""
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            except OSError:  # too many open files: close the oldest connection
                self._drop(next(iter(self._waiting), None))
                return
            connection.setblocking(False)
            self._loop.add_reader(connection, self._on_data, connection)
            self._wait_for(connection)

    def _wait_for(self, connection: socket.socket) -> None:
        """Wait for a request on a connection; the oldest are dropped if there are too many."""
        now = time.monotonic()
        self._waiting[connection] = now
        if len(self._waiting) > MAX_PENDING:
            self._drop(next(iter(self._waiting)))
        for _ in range(2):  # checks two for each new one, so that expired ones cannot accumulate
            oldest = next(iter(self._waiting))
            if now - self._waiting[oldest] > HEAD_SECONDS:
                self._drop(oldest)

    def _on_data(self, connection: socket.socket) -> None:
        """Read a request head; answer a health check, or queue the connection for uvicorn."""
        try:
            data = connection.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        data = self._partial_heads.pop(connection, b"") + data
        if b"\r\n\r\n" not in data and len(data) <= HEADER_BYTES:
            self._partial_heads[connection] = data
            return
        response = self._health() if _asks_for_health(data) else None
        if response is not None and self._send(connection, response):
            self._waiting.pop(connection, None)
            if b"\nconnection: close" in data.lower():
                self._drop(connection)
            else:
                self._wait_for(connection)
            return
        self._loop.remove_reader(connection)
        self._waiting.pop(connection, None)
        if not self._ready:
            self._loop.call_soon(self._admit_some)
        self._ready.append((connection, data))
        if len(self._ready) > MAX_PENDING:
            self._ready.popleft()[0].close()

    def _admit_some(self) -> None:
        """Hand a few queued connections to uvicorn; the rest follow in later turns of the event loop."""
        for _ in range(min(ADMISSIONS_PER_TURN, len(self._ready))):
            connection, data = self._ready.popleft()
            if _is_gone(connection):
                connection.close()
                continue
            task = self._loop.create_task(self._admit(connection, data))
            self._admissions.add(task)
            task.add_done_callback(self._admissions.discard)
        if self._ready:
            self._loop.call_soon(self._admit_some)

    @staticmethod
    def _send(connection: socket.socket, response: bytes) -> bool:
        """Send a short response; return False if the socket does not accept all of it at once."""
        with contextlib.suppress(OSError):
            return connection.send(response) == len(response)
        return False

    async def _admit(self, connection: socket.socket, data: bytes) -> None:
        """Hand a connection to uvicorn, with the data received so far."""
        protocol = self._make()
        if isinstance(protocol, GuardedProtocol):
            protocol.initial_data = data
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, connection)
        except OSError:
            connection.close()

    def _drop(self, connection: socket.socket | None) -> None:
        """Close a connection that has not sent its head; None is ignored."""
        if connection is not None:
            self._loop.remove_reader(connection)
            self._waiting.pop(connection, None)
            self._partial_heads.pop(connection, None)
            connection.close()


def _is_gone(connection: socket.socket) -> bool:
    """Tell whether the client has closed the connection completely, not only its sending side."""
    try:
        connection.recv(1, socket.MSG_PEEK)
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True
    return False


_HEADERS_WITH_BODY = (b"\ncontent-length:", b"\ntransfer-encoding:", b"\nexpect:", b"\nupgrade:")


def _asks_for_health(data: bytes) -> bool:
    """Tell whether the data is exactly one request for /health, without a body."""
    head = data.startswith(b"GET /health HTTP/1.1\r\n") and data.endswith(b"\r\n\r\n")
    lower = data.lower()
    return head and lower.count(b"\r\n\r\n") == 1 and not any(name in lower for name in _HEADERS_WITH_BODY)


class GuardedServer(uvicorn.Server):
    """uvicorn server that receives connections only after their request head has arrived."""

    def __init__(self, app: Limits, listening: socket.socket, proxy_headers: bool = False) -> None:
        """Configure uvicorn to serve `app` on an open socket, with short time-outs and its own logs off."""
        config = uvicorn.Config(
            app,
            http=GuardedProtocol,
            ws="none",
            log_level="error",  # what strangers send is in the access log, not here
            access_log=False,
            proxy_headers=proxy_headers,
            timeout_keep_alive=10,
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=HEADER_BYTES,
        )
        super().__init__(config)
        self._pending = PendingConnections(listening, self._protocol, app.health)

    def stop_on_signals(self) -> None:
        """Make SIGTERM and Ctrl-C stop the server from now on, even before it runs.

        The handler only sets a flag: Python drops an exception that a signal raises inside a finalizer.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self.should_exit = True

    def _protocol(self) -> asyncio.Protocol:
        settings = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
        return self.config.http_protocol_class(**settings)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._pending.open()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._pending.close()
        await super().shutdown(sockets)


def _make_room(loop: asyncio.AbstractEventLoop, connections: Any) -> None:
    """Close some connections now, and more a moment later, while there are too many."""
    if len(connections) > MAX_CONNECTIONS:
        _close_some(connections)
        loop.call_later(CLOSE_INTERVAL_SECONDS, _make_room, loop, connections)


def _close_some(connections: Any) -> None:
    """Close the 32 connections that the server has waited for longest; closing takes time, so not all at once."""
    waiting = [c for c in connections if isinstance(c, GuardedProtocol) and c.waits_for_client()]
    for oldest in heapq.nsmallest(32, waiting, key=lambda c: c.waiting_since):
        connections.discard(oldest)
        oldest.transport.abort()


def allow_files(count: int = 8 * MAX_CONNECTIONS) -> None:
    """Raise this process's limit on open files to at least `count`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft < limit:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
