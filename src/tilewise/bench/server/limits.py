"""What strangers may send: bodies are measured before they are read, and large ones wait for each other.

A plain ASGI layer around the application. A declared length beyond the limit is refused before a byte is read; a body
without a length is cut off where it exceeds the small limit; and only a few large bodies are held in memory at a time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Any, Receive, Send], Awaitable[None]]

MOST_BODY = 12 << 20
SMALL_BODY = 256 << 10
_LARGE_AT_A_TIME = 4
_SECONDS_TO_SEND = 30.0
HEADERS = {
    b"content-security-policy": b"default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
    b"form-action 'self'; object-src 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
}


class Limits:
    """Wraps an application."""

    def __init__(self, app: Application) -> None:
        self.app = app
        self._large = asyncio.Semaphore(_LARGE_AT_A_TIME)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        guarded = _with_headers(send)
        length = _declared_length(scope)
        if length is not None and (length < 0 or length > MOST_BODY):
            await _refuse(guarded, f"a request may bring {MOST_BODY:,} bytes at most")
            return
        if length is not None and length > SMALL_BODY:
            async with self._large:
                await self._read_then_run(scope, receive, guarded, length)
        elif scope["method"] in ("POST", "PUT", "PATCH", "DELETE"):
            await self._read_then_run(scope, receive, guarded, SMALL_BODY if length is None else length)
        else:
            await self.app(scope, receive, guarded)

    async def _read_then_run(self, scope: Any, receive: Receive, send: Send, most: int) -> None:
        try:
            body = await asyncio.wait_for(_read(receive, most), _SECONDS_TO_SEND)
        except TimeoutError:
            body = None
        if body is None:
            await _refuse(
                send, f"this request brings more than the {most:,} bytes it may, or takes too long to send them"
            )
            return
        sent = False

        async def replay() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)


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


def _with_headers(send: Send) -> Send:
    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            present = {name.lower() for name, _ in message.get("headers", [])}
            extra = [(name, value) for name, value in HEADERS.items() if name not in present]
            message["headers"] = [*message.get("headers", []), *extra]
        await send(message)

    return guarded


async def _refuse(send: Send, sentence: str) -> None:
    body = json.dumps({"detail": sentence, "code": "too large"}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 413, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})
