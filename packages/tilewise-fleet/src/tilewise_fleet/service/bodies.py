"""Parsing of requests for choices.

Such a request contains a list of configurations, hundreds of them and the same list every time. The parser recognizes
it by its bytes and parses it once; the remainder of a request is short.
"""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from typing import Any

from tilewise.errors import Rejected
from tilewise.web.routes import parse_object

_MAX_LISTS, _MIN_LIST_BYTES = 64, 256  # cached lists (arbitrary); parsing a shorter list is as fast as finding it
_KEY, _PLACEHOLDER = b'"configs"', -1  # the value that replaces a cached list in the text


class KnownList(list[Any]):
    """A parsed list of configurations, with what the service derived from it at an earlier request."""

    entry: tuple[int, Any] | None = None  # its number, and the configurations


class ListCache:
    """JSON parser that caches the lists of configurations in request bodies by their bytes."""

    def __init__(self) -> None:
        self._lists: OrderedDict[bytes, KnownList] = OrderedDict()

    def parse(self, content: bytes) -> dict[str, Any]:
        """Parse a request's body; an equal list of configurations is returned as the same object."""
        # The quoted key can only be a complete JSON string, because quotes inside a string have a backslash. If it
        # occurs once, and the placeholder is parsed as its value, then the replaced text was exactly that value.
        begin, end = _find_list(content)
        if end - begin < _MIN_LIST_BYTES:
            return parse_object(content)
        text = content[begin:end]
        cached = self._lists.get(text)
        if cached is not None:
            with contextlib.suppress(Rejected):
                value = parse_object(content[:begin] + b"%d" % _PLACEHOLDER + content[end:])
                if value.get("configs") == _PLACEHOLDER:
                    value["configs"] = cached
                    return value
        value = parse_object(content)
        if isinstance(value.get("configs"), list) and value["configs"] == _parse_value(text):
            value["configs"] = self._lists[text] = KnownList(value["configs"])
            if len(self._lists) > _MAX_LISTS:
                self._lists.popitem(last=False)
        return value


def _parse_value(text: bytes) -> Any:
    """Parse bytes as a single JSON value; None if they are not exactly one."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _find_list(content: bytes) -> tuple[int, int]:
    """Return (start, end) of the list of configurations in a JSON body; (0, 0) if it is not clear."""
    key = content.find(_KEY)
    begin = content.find(b"[", key)
    if key < 0 or begin < 0 or content[key + len(_KEY) : begin].strip() != b":" or content.find(_KEY, begin) >= 0:
        return 0, 0
    return begin, content.find(b"]", begin) + 1
