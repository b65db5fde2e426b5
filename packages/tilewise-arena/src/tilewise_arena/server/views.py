"""Pages and lists that are made once for each state of the board, however many people look at them.

The hash of the ledger's last link names the state: it is the answer's ETag, so a browser that has the page gets 304,
and the key under which what was made is kept. A crowd that looks while an entry is measured costs a lookup each.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from fastapi import Request
from fastapi.responses import Response

from tilewise_arena.server.service import Service

_MOST_KEPT = 128


class Views:
    """Cache of rendered pages by address, valid until the board changes."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._pages: OrderedDict[str, Response] = OrderedDict()
        self._making = asyncio.Lock()

    async def show(self, request: Request, what: object, make: Callable[[], Awaitable[Response]]) -> Response:
        """Return the response of `make()` from the cache or anew; `what` identifies it besides the address."""
        _, head = await self._service.read(self._service.board.head)
        name = f"{head} {request.url.path} {what!r}"
        tag = f'"{hashlib.sha256(name.encode()).hexdigest()[:32]}"'
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers={"ETag": tag})
        if tag not in self._pages:
            async with self._making:  # a crowd that comes at once waits for the first
                if tag not in self._pages:
                    await self._make(tag, make)
        answer = self._pages[tag]
        self._pages.move_to_end(tag)
        return Response(answer.body, answer.status_code, dict(answer.headers))

    async def _make(self, tag: str, make: Callable[[], Awaitable[Response]]) -> None:
        """Render a page and cache it under an ETag; the oldest pages are dropped beyond the limit."""
        answer = await make()
        answer.headers["ETag"] = tag
        answer.headers["Cache-Control"] = "no-cache"
        self._pages[tag] = answer
        while len(self._pages) > _MOST_KEPT:
            self._pages.popitem(last=False)
