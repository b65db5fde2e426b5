"""Limits on the size, rate and concurrency of requests, applied before a body is read and a route is looked up.

This is an ASGI layer around the application. It identifies clients by their tokens. Only clients with a valid token may
send large bodies, one at a time each, and only a few such bodies are in memory at once. A declared length over the
limit is rejected before a byte is read; a body without a length is cut off at the small limit. Each client has a few
requests processed at once, and its other requests wait. Every response is one line in the access log, except for the
health checks that `connections.PendingConnections` answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tilewise.errors import Rejected, TilewiseError, UnavailableError
from tilewise.web.health import Pulse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


from collections import OrderedDict


class TokenHolder(Protocol):
    """The owner of an access token; limits need only the token's name."""

    @property
    def id(self) -> str:
        """Public name of the token."""


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Any, Receive, Send], Awaitable[None]]
Lookup = Callable[[str], Awaitable[TokenHolder | None]]

access = logging.getLogger("tilewise.access")
MAX_BODY_BYTES = 1 << 20  # with a valid token, unless the service allows more; arbitrary
SMALL_BODY_BYTES = 256 << 10  # without a token; arbitrary
HOLDER = "tilewise.holder"  # key of the token's owner in the scope of a request
_MAX_LARGE_BODIES = 8  # at once; arbitrary, at most 96 MiB of memory
_MAX_ACTIVE_PER_CLIENT = 2  # requests that are processed at once; arbitrary
_MAX_WAITING_PER_CLIENT = 512  # equal to the number of connections: a class may share one address
_REJECTION_DELAY_SECONDS = 1.0  # slows down clients over their rate; arbitrary
_BODY_SECONDS = 30.0  # for sending a body; arbitrary
_METHODS_WITH_BODY = ("POST", "PUT", "PATCH", "DELETE")
HEADERS = {
    b"content-security-policy": b"default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
    b"form-action 'self'; object-src 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
}
_NO_STORE = {b"cache-control": b"no-store"}  # pages of the teacher show new tokens, which no browser may cache


_STATUS = {"token": 401, "team": 403, "machine": 403, "replayed": 409, "event closed": 409, "conflict": 409}
_STATUS |= {"too large": 413, "room": 413, "rate": 429, "queue": 429}  # of the codes of `Rejected`; others mean 400


def status_of(error: TilewiseError) -> int:
    """Return the HTTP status of an error."""
    return 503 if isinstance(error, UnavailableError) else _STATUS.get(getattr(error, "code", ""), 400)


def error_facts(error: TilewiseError) -> dict[str, Any]:
    """Return the JSON body of an error's response: a sentence, a code for programs, and further fields."""
    code = getattr(error, "code", "") or "refused"
    return {"detail": str(error), "code": code, **getattr(error, "facts", {})}


class Limits:
    """Wraps an application.

    `lookup` finds the owner of a token, and `rate` is the number of requests per second and client. `pulse` measures
    the health of the service. A body with a token has `max_body_bytes` at most.
    """

    def __init__(
        self,
        app: Application,
        lookup: Lookup,
        rate: float = 40.0,
        pulse: Pulse | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        """Wrap `app`; see the class for the parameters."""
        self.app, self._lookup, self._pulse, self._max_body_bytes = app, lookup, pulse, max_body_bytes
        self._queues: dict[str, _ClientQueue] = {}
        self._rates = Rates(rate, 5 * rate)
        self._large_bodies = asyncio.Semaphore(_MAX_LARGE_BODIES)
        self._sending: set[str] = set()  # owners that are sending a large body

    def health(self) -> bytes | None:
        """Return the complete HTTP response to GET /health if the database's last check is recent, else None."""
        facts = None if self._pulse is None else self._pulse.last()
        if facts is None:
            return None
        body = json.dumps(facts).encode()
        lines = [b"HTTP/1.1 200 OK", b"content-type: application/json", b"content-length: %d" % len(body)]
        return b"\r\n".join([*lines, *(name + b": " + value for name, value in HEADERS.items()), b"", body])

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Answer a health check, or apply the limits and pass the request on; writes the access log."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        more = _NO_STORE if scope["path"].startswith("/teacher") else {}
        response = _ResponseSender(send, HEADERS | more)
        start = time.monotonic()
        try:
            if self._pulse is not None and scope["path"] == "/health" and scope["method"] == "GET":
                await _send_json(response, 200, await self._pulse.check())
            else:
                await self._pass_on(scope, receive, response)
        except (Rejected, UnavailableError) as error:
            await _send_error(response, error)
        except asyncio.CancelledError:  # the server is shutting down
            if not response.status:
                await _send_error(response, UnavailableError("the server is being stopped; try again in a moment"))
        finally:
            _log(scope, response, time.monotonic() - start)

    async def _pass_on(self, scope: Any, receive: Receive, send: Send) -> None:
        """Run the application on a request that is within the limits on size, rate and concurrency."""
        length = _declared_length(scope)
        if length is not None and (length < 0 or length > self._max_body_bytes):
            raise Rejected("too large", f"a request body may have at most {self._max_body_bytes:,} bytes")
        async with self._client_slot(_client_key(scope, None)):
            holder = scope[HOLDER] = await self._find_holder(scope)
        client = _client_key(scope, holder)
        if not self._rates.take(client):
            await asyncio.sleep(_REJECTION_DELAY_SECONDS)
            raise Rejected("rate", "too many requests in a short time; try again in a moment")
        if length is not None and length > SMALL_BODY_BYTES:
            async with self._large_body(holder):
                await self._read_then_run(scope, receive, send, length, client)
        elif scope["method"] in _METHODS_WITH_BODY:
            await self._read_then_run(scope, receive, send, SMALL_BODY_BYTES if length is None else length, client)
        else:
            async with self._client_slot(client):
                first = await receive()
                if first["type"] == "http.request":  # otherwise the client has disconnected
                    await self.app(scope, _replay(first, receive), send)

    @asynccontextmanager
    async def _client_slot(self, client: str) -> AsyncIterator[None]:
        """Hold one of the client's slots inside the block, waiting for it if necessary."""
        requests = self._queues.setdefault(client, _ClientQueue())
        if requests.count >= _MAX_WAITING_PER_CLIENT:
            raise Rejected("rate", "too many requests of this client are waiting; try again in a moment")
        requests.count += 1
        try:
            async with requests.slots:
                yield
        finally:
            requests.count -= 1
            if not requests.count:
                self._queues.pop(client, None)

    async def _find_holder(self, scope: Any) -> TokenHolder | None:
        """Return the owner of the request's bearer token; None if there is no valid one."""
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, token = header.decode("latin-1").partition(" ")
        return await self._lookup(token) if scheme.lower() == "bearer" and 0 < len(token) <= 200 else None

    @asynccontextmanager
    async def _large_body(self, holder: TokenHolder | None) -> AsyncIterator[None]:
        """Hold a slot for large bodies inside the block; each token's owner gets one at a time."""
        if holder is None:
            raise Rejected("token", f"a request body without a valid token may have at most {SMALL_BODY_BYTES:,} bytes")
        if holder.id in self._sending:
            raise Rejected("rate", "a token may send one large request at a time")
        self._sending.add(holder.id)
        try:
            async with self._large_bodies:
                yield
        finally:
            self._sending.discard(holder.id)

    async def _read_then_run(self, scope: Any, receive: Receive, send: Send, limit: int, client: str) -> None:
        """Read the whole body, at most `limit` bytes, then run the application in a slot of the client."""
        try:
            body = await asyncio.wait_for(_read(receive, limit), _BODY_SECONDS)
        except TimeoutError:
            body = None
        if body is None:
            sentence = f"the request body is longer than {limit:,} bytes, or was sent too slowly"
            raise Rejected("too large", sentence)
        message = {"type": "http.request", "body": body, "more_body": False}
        async with self._client_slot(client):
            await self.app(scope, _replay(message, receive), send)


@dataclass
class _ClientQueue:
    """The requests of one client: slots for those in progress, and the number of all."""

    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_ACTIVE_PER_CLIENT))
    count: int = 0


def _replay(first: Message, receive: Receive) -> Receive:
    """Return a `receive` function that first returns the message `first`, then those of `receive`."""
    messages = [first]

    async def receive_next() -> Message:
        return messages.pop() if messages else await receive()

    return receive_next


async def _read(receive: Receive, limit: int) -> bytes | None:
    """Read a request's body; None if it is longer than `limit` bytes or the client disconnects."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > limit:
            return None
        if not message.get("more_body", False):
            return bytes(body)


def _declared_length(scope: Any) -> int | None:
    """Return the request's Content-Length in bytes; None without one, -1 if it is invalid."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() and len(value) < 16 else -1
    return None


def _client_key(scope: Any, holder: TokenHolder | None) -> str:
    """Return a key for the client of a request: its token's name, or else its address.

    Of an IPv6 address only the first 64 bits count, because a provider assigns such a network to each customer.
    """
    if holder is not None:
        return f"token {holder.id}"
    address = str(scope["client"][0]) if scope.get("client") else "-"
    with contextlib.suppress(ValueError):
        address = ipaddress.IPv6Address(address.partition("%")[0]).exploded[:19]
    return f"address {address}"


class _ResponseSender:
    """Sends the application's messages with the site's headers, and records the status and length for the log."""

    def __init__(self, send: Send, headers: Mapping[bytes, bytes]) -> None:
        self._send, self._headers = send, headers
        self.status, self.length = 0, 0

    async def __call__(self, message: Message) -> None:
        """Send one message, with additional headers if it starts the response."""
        if message["type"] == "http.response.start":
            self.status = int(message["status"])
            present = {name.lower() for name, _ in message.get("headers", [])}
            extra = [(name, value) for name, value in self._headers.items() if name not in present]
            message["headers"] = [*message.get("headers", []), *extra]
        elif message["type"] == "http.response.body":
            self.length += len(message.get("body", b""))
        await self._send(message)


def _log(scope: Any, response: _ResponseSender, seconds: float) -> None:
    """Write the line of the access log; control characters in the path are escaped."""
    holder = scope.get(HOLDER)
    who = "-" if holder is None else holder.id
    address = scope["client"][0] if scope.get("client") else "-"
    path = scope.get("raw_path") or scope["path"].encode("ascii", "replace")
    printable = path[:200].decode("ascii", "backslashreplace").encode("unicode_escape").decode()
    line = (address, who, scope["method"], printable, response.status, response.length, 1e3 * seconds)
    access.info("%s %s %s %s %d %d %.1f ms", *line)


async def _send_error(send: _ResponseSender, error: TilewiseError) -> None:
    """Send an error as JSON with its status; the connection is closed unless the status is 429."""
    # Except after a rate limit, the body was not read, so the connection cannot be used again.
    status = status_of(error)
    more = (b"retry-after", b"2") if status == 429 else (b"connection", b"close")
    await _send_json(send, status, error_facts(error), more)


async def _send_json(send: _ResponseSender, status: int, content: dict[str, Any], *more: tuple[bytes, bytes]) -> None:
    """Send a complete JSON response with a status and additional headers `more`."""
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


_MAX_CLIENTS = 4096  # buckets in memory; arbitrary


class Rates:
    """Token buckets: each client may send `burst` requests at once and `per_second` on average (0: unlimited)."""

    def __init__(self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second, self._burst, self._clock = per_second, burst, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # client: (tokens, time)

    def take(self, client: str) -> bool:
        """Take one token from a client's bucket; return False if it is empty."""
        if not self._per_second:
            return True
        now = self._clock()
        tokens, last = self._buckets.pop(client, (self._burst, now))
        tokens = min(self._burst, tokens + (now - last) * self._per_second)
        allowed = tokens >= 1
        self._buckets[client] = (tokens - allowed, now)
        if len(self._buckets) > _MAX_CLIENTS:  # the least recent client has probably a full bucket again
            self._buckets.popitem(last=False)
        return allowed
