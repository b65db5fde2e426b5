"""Request bodies: reading them with limits on size and time, and parsing their JSON.

A request for choices contains a list of configurations, hundreds of them and the same list every time. The parser
recognizes such a list by its bytes and parses it once; the remainder of a request is short.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import OrderedDict
from typing import Any

from starlette.requests import Request

from tilewise.errors import Rejected

MAX_BODY_BYTES = 1 << 20  # arbitrary
_BODY_SECONDS = 20.0  # arbitrary
_MAX_LISTS, _MIN_LIST_BYTES = 64, 256  # cached lists (arbitrary); parsing a shorter list is as fast as finding it
_KEY, _PLACEHOLDER = b'"configs"', -1  # the value that replaces a cached list in the text


async def read_body(request: Request) -> bytes:
    """Read the body of a request.

    A declared length over the limit is rejected before anything is read; a body without a length is cut off there.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise Rejected("schema", "the body must be application/json")
    declared = request.headers.get("content-length", "0")
    if not declared.isdigit() or len(declared) > 9 or int(declared) > MAX_BODY_BYTES:
        raise Rejected("too large", f"a request body may have {MAX_BODY_BYTES:,} bytes at most")
    content = bytearray()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                content += chunk
                if len(content) > MAX_BODY_BYTES:
                    break
            else:
                return bytes(content)
    raise Rejected("too large", f"a request body may have {MAX_BODY_BYTES:,} bytes at most, within {_BODY_SECONDS:g} s")


def parse(content: bytes) -> dict[str, Any]:
    """Parse a body, which must be a JSON object without NaN or infinity."""
    try:
        value = json.loads(content, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Rejected("schema", "the body must be a JSON object")
    return value


def _reject_constant(name: str) -> Any:
    raise ValueError(name)


class ListCache:
    """A JSON parser that caches lists of configurations by their bytes."""

    def __init__(self) -> None:
        self._lists: OrderedDict[bytes, Any] = OrderedDict()

    def parse(self, content: bytes) -> dict[str, Any]:
        """Parse a body; a list of configurations that was parsed before is returned as the same object."""
        # The quoted key can only be a complete JSON string, because quotes inside a string have a backslash. If it
        # occurs once, and the placeholder is parsed as its value, then the replaced text was exactly that value.
        begin, end = _find_list(content)
        if end - begin < _MIN_LIST_BYTES:
            return parse(content)
        text = content[begin:end]
        cached = self._lists.get(text)
        if cached is not None:
            with contextlib.suppress(Rejected):
                value = parse(content[:begin] + b"%d" % _PLACEHOLDER + content[end:])
                if value.get("configs") == _PLACEHOLDER:
                    value["configs"] = cached
                    return value
        value = parse(content)
        if isinstance(value.get("configs"), list) and value["configs"] == _parse_value(text):
            self._lists[text] = value["configs"]
            if len(self._lists) > _MAX_LISTS:
                self._lists.popitem(last=False)
        return value


def _parse_value(text: bytes) -> Any:
    """Parse bytes as one JSON value; None if they are not a complete value."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _find_list(content: bytes) -> tuple[int, int]:
    """Find the list of configurations in a body; returns its first and last position, or (0, 0) if unclear."""
    key = content.find(_KEY)
    begin = content.find(b"[", key)
    if key < 0 or begin < 0 or content[key + len(_KEY) : begin].strip() != b":" or content.find(_KEY, begin) >= 0:
        return 0, 0
    return begin, content.find(b"]", begin) + 1
