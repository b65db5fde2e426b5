"""What strangers may send, and how often: looked at before a body is read and before a route is found.

A plain ASGI layer around the application. Whoever brings a token is known by it here already: only known teams send
large bodies, one at a time each, and only a few such bodies are held in memory at once. A declared length beyond the
limit is refused before a byte is read; a body without a length is cut off at the small limit. A client has a few
requests worked on at once; the others wait. Every answer is one line in the access log, but for what is said about the
board's health at the door (see connections).
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

from tilewise.errors import UnavailableError
from tilewise.web.rates import Rates

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Holder(Protocol):
    """The owner of an access token, as far as limits need to know them."""

    @property
    def id(self) -> str:
        """The token's public name."""


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Any, Receive, Send], Awaitable[None]]
Lookup = Callable[[str], Awaitable[Holder | None]]
Pulse = Callable[[], Awaitable[dict[str, Any]]]

access = logging.getLogger("tilewise.access")
MOST_BODY = 12 << 20
SMALL_BODY = 256 << 10
HOLDER = "tilewise.holder"  # where a request's scope says whose token it brought
_LARGE_AT_A_TIME = 8
_OF_ONE_CLIENT = 2  # requests that are worked on at once; what else a client sends waits for these
_WAITING_OF_ONE_CLIENT = 512  # as many as there are connections: a class behind one address may come at once
_SECONDS_REFUSED = 1.0  # how long somebody who asks too often waits for the refusal
_SECONDS_TO_SEND = 30.0
_CHANGING = ("POST", "PUT", "PATCH", "DELETE")
HEADERS = {
    b"content-security-policy": b"default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
    b"form-action 'self'; object-src 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
}
_NOT_KEPT = {b"cache-control": b"no-store"}  # a teacher's page holds new tokens, and a shared browser keeps what it may


class Refused(Exception):
    """A request that goes no further: its status, a code for programs and a sentence for people."""

    def __init__(self, status: int, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.code = status, code


class Limits:
    """Wraps an application; `lookup` finds the holder of a token, `rate` is what one client may ask in a second."""

    def __init__(
        self,
        app: Application,
        lookup: Lookup,
        rate: float = 40.0,
        pulse: Pulse | None = None,
        known: Callable[[], dict[str, Any] | None] | None = None,
    ) -> None:
        self.app, self._lookup, self._pulse, self._known = app, lookup, pulse, known
        self._places: dict[str, _Places] = {}
        self._rates = Rates(rate, 5 * rate)
        self._slots = asyncio.Semaphore(_LARGE_AT_A_TIME)
        self._sending: set[str] = set()  # holders whose large body is on its way

    def health(self) -> bytes | None:
        """The whole answer to GET /health where it is known already, for a connection that asks nothing else."""
        facts = None if self._known is None else self._known()
        if facts is None:
            return None
        body = json.dumps(facts).encode()
        lines = [b"HTTP/1.1 200 OK", b"content-type: application/json", b"content-length: %d" % len(body)]
        return b"\r\n".join([*lines, *(name + b": " + value for name, value in HEADERS.items()), b"", body])

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answer = _Answer(send, _NOT_KEPT if scope["path"].startswith("/teacher") else {})
        started = time.monotonic()
        try:
            if self._pulse is not None and scope["path"] == "/health" and scope["method"] == "GET":
                await _say(answer, 200, await self._pulse())
            else:
                await self._pass_on(scope, receive, answer)
        except Refused as refused:
            await _refuse(answer, refused)
        except UnavailableError as error:
            await _refuse(answer, Refused(503, "refused", str(error)))
        except asyncio.CancelledError:  # the server has waited for this long enough
            if not answer.status:
                await _refuse(answer, Refused(503, "refused", "the board is being stopped; try again in a moment"))
        finally:
            _log(scope, answer, time.monotonic() - started)

    async def _pass_on(self, scope: Any, receive: Receive, send: Send) -> None:
        length = _declared_length(scope)
        if length is not None and (length < 0 or length > MOST_BODY):
            raise Refused(413, "too large", f"a request may bring {MOST_BODY:,} bytes at most")
        async with self._place(_client(scope, None)):
            holder = scope[HOLDER] = await self._holder(scope)
        client = _client(scope, holder)
        if not self._rates.take(client):
            await asyncio.sleep(_SECONDS_REFUSED)
            raise Refused(429, "rate", "these are too many requests in a short time; try again in a moment")
        if length is not None and length > SMALL_BODY:
            async with self._large(holder):
                await self._read_then_run(scope, receive, send, length, client)
        elif scope["method"] in _CHANGING:
            await self._read_then_run(scope, receive, send, SMALL_BODY if length is None else length, client)
        else:
            async with self._place(client):
                first = await receive()
                if first["type"] == "http.request":  # else whoever asked has not waited for the answer
                    await self.app(scope, _after(first, receive), send)

    @asynccontextmanager
    async def _place(self, client: str) -> AsyncIterator[None]:
        """One of a client's few places; what is forgotten is a client that holds none."""
        places = self._places.setdefault(client, _Places())
        if places.wanted >= _WAITING_OF_ONE_CLIENT:
            raise Refused(429, "rate", "too many requests of this client wait already; try again in a moment")
        places.wanted += 1
        try:
            async with places.free:
                yield
        finally:
            places.wanted -= 1
            if not places.wanted:
                self._places.pop(client, None)

    async def _holder(self, scope: Any) -> Holder | None:
        """Whose token came with the request, if any did."""
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, token = given.decode("latin-1").partition(" ")
        return await self._lookup(token) if scheme.lower() == "bearer" and 0 < len(token) <= 200 else None

    @asynccontextmanager
    async def _large(self, holder: Holder | None) -> AsyncIterator[None]:
        """One of the few places for a large body, for someone who is known and holds no other."""
        if holder is None:
            raise Refused(401, "token", f"without a token that the board knows {SMALL_BODY:,} bytes are the most")
        if holder.id in self._sending:
            raise Refused(429, "rate", "one large request of a token is taken at a time")
        self._sending.add(holder.id)
        try:
            async with self._slots:
                yield
        finally:
            self._sending.discard(holder.id)

    async def _read_then_run(self, scope: Any, receive: Receive, send: Send, most: int, client: str) -> None:
        try:
            body = await asyncio.wait_for(_read(receive, most), _SECONDS_TO_SEND)
        except TimeoutError:
            body = None
        if body is None:
            sentence = f"this request brings more than the {most:,} bytes it may, or takes too long to send them"
            raise Refused(413, "too large", sentence)
        whole = {"type": "http.request", "body": body, "more_body": False}
        async with self._place(client):
            await self.app(scope, _after(whole, receive), send)


@dataclass
class _Places:
    """What one client may have worked on at once, and how many of its requests there are."""

    free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_OF_ONE_CLIENT))
    wanted: int = 0


def _after(first: Message, receive: Receive) -> Receive:
    """A `receive` that gives `first` once more, and then what comes."""
    given = [first]

    async def replay() -> Message:
        return given.pop() if given else await receive()

    return replay


async def _read(receive: Receive, most: int) -> bytes | None:
    parts = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts += message.get("body", b"")
        if len(parts) > most:
            return None
        if not message.get("more_body", False):
            return bytes(parts)


def _declared_length(scope: Any) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() and len(value) < 16 else -1
    return None


def _client(scope: Any, holder: Holder | None) -> str:
    """Who asks: the holder of a token, or an address; of IPv6 the half that one customer of a provider is given."""
    if holder is not None:
        return f"token {holder.id}"
    address = str(scope["client"][0]) if scope.get("client") else "-"
    with contextlib.suppress(ValueError):
        address = ipaddress.IPv6Address(address.partition("%")[0]).exploded[:19]
    return f"address {address}"


class _Answer:
    """Sends on what the application sends, with the site's headers, and remembers what the log wants to know."""

    def __init__(self, send: Send, more: Mapping[bytes, bytes]) -> None:
        self._send, self._headers = send, HEADERS | dict(more)
        self.status, self.length = 0, 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = int(message["status"])
            present = {name.lower() for name, _ in message.get("headers", [])}
            extra = [(name, value) for name, value in self._headers.items() if name not in present]
            message["headers"] = [*message.get("headers", []), *extra]
        elif message["type"] == "http.response.body":
            self.length += len(message.get("body", b""))
        await self._send(message)


def _log(scope: Any, answer: _Answer, seconds: float) -> None:
    holder = scope.get(HOLDER)
    who = "-" if holder is None else holder.id
    address = scope["client"][0] if scope.get("client") else "-"
    path = scope.get("raw_path") or scope["path"].encode("ascii", "replace")
    shown = path[:200].decode("ascii", "backslashreplace").encode("unicode_escape").decode()
    line = (address, who, scope["method"], shown, answer.status, answer.length, 1e3 * seconds)
    access.info("%s %s %s %s %d %d %.1f ms", *line)


async def _refuse(send: _Answer, refused: Refused) -> None:
    # apart from a rate, what was announced is not read, so nothing more is understood on this connection
    more = (b"retry-after", b"2") if refused.status == 429 else (b"connection", b"close")
    await _say(send, refused.status, {"detail": str(refused), "code": refused.code}, more)


async def _say(send: _Answer, status: int, content: dict[str, Any], *more: tuple[bytes, bytes]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
