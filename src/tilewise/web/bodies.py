"""What comes in over HTTP: bodies of a bounded length, read in a bounded time, and the JSON in them.

A question brings its list of configurations along, hundreds of them and the same ones every time. Such a list is
recognised by its bytes and parsed once: the rest of a question is a few words.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import OrderedDict
from typing import Any

from starlette.requests import Request

from tilewise.errors import Rejected

MOST_BODY = 1 << 20
_SECONDS_FOR_BODY = 20.0
_MOST_LISTS, _LEAST_LIST = 64, 256  # lists that are remembered; shorter ones are parsed as fast
_KEY, _IN_PLACE = b'"configs"', -1  # what stands for a list that was taken out


async def read_body(request: Request) -> bytes:
    """The body, refused before it is read where it says that it is too long, and cut off where it does not say."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Rejected("schema", "this takes application/json")
    declared = request.headers.get("content-length", "0")
    if not declared.isdigit() or len(declared) > 9 or int(declared) > MOST_BODY:
        raise Rejected("too large", f"a request may bring {MOST_BODY:,} bytes at most")
    content = bytearray()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_SECONDS_FOR_BODY):
            async for part in request.stream():
                content += part
                if len(content) > MOST_BODY:
                    break
            else:
                return bytes(content)
    raise Rejected("too large", f"a request may bring {MOST_BODY:,} bytes at most, and soon")


def parse(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Rejected("schema", "the body is a JSON object")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(name)


class Lists:
    """Lists of configurations by their bytes, as parsed before."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Any] = OrderedDict()

    def parse(self, content: bytes) -> dict[str, Any]:
        """The object in a body; a list of configurations that came before is the same object as then."""
        # A quoted word is a whole string of JSON's, never a piece of one, whose quotes would have a backslash. So where
        # it comes once, and what stands for a whole value is found again under that key, nothing else can be meant.
        begin, end = _list_in(content)
        if end - begin < _LEAST_LIST:
            return parse(content)
        text = content[begin:end]
        known = self._known.get(text)
        if known is not None:
            with contextlib.suppress(Rejected):
                rest = parse(content[:begin] + b"%d" % _IN_PLACE + content[end:])
                if rest.get("configs") == _IN_PLACE:
                    rest["configs"] = known
                    return rest
        found = parse(content)
        if isinstance(found.get("configs"), list) and found["configs"] == _value(text):
            self._known[text] = found["configs"]
            if len(self._known) > _MOST_LISTS:
                self._known.popitem(last=False)
        return found


def _value(text: bytes) -> Any:
    """What the bytes mean by themselves; None where they are a piece of something."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _list_in(content: bytes) -> tuple[int, int]:
    """Where the list of configurations lies in a body; (0, 0) where that is not plain to see."""
    key = content.find(_KEY)
    begin = content.find(b"[", key)
    if key < 0 or begin < 0 or content[key + len(_KEY) : begin].strip() != b":" or content.find(_KEY, begin) >= 0:
        return 0, 0
    return begin, content.find(b"]", begin) + 1
