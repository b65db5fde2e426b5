"""Parses untrusted JSON within bounds, and writes JSON canonically.

Everything is looked at before the parser runs, in one pass over the bytes: size, nesting, the length of numbers, and
how much stands outside of strings (a recipe is small; what is large is a file in base64, one long string). A bomb of a
million brackets and a string that never ends cost the same as any other bytes. `canonical` writes a value in exactly
one way, which is what hashes are taken of.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tilewise.errors import Rejected

MOST_BYTES = 64 << 10
MOST_DEPTH = 12
_MOST_ESCAPES = 4 * MOST_BYTES
_MOST_QUOTES = MOST_BYTES  # more would not leave room for anything outside of them


def canonical(value: Any) -> bytes:
    """Encode as canonical JSON: sorted keys, no spaces, ASCII, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def plain_value(value: Any) -> Any:
    """Convert a NumPy number or a sequence to plain JSON data; the `default` function of json.dumps."""
    return value.item() if hasattr(value, "item") else list(value)


def parse_json(source: bytes | str, most_bytes: int = MOST_BYTES, most_depth: int = MOST_DEPTH) -> Any:
    """Parse JSON of bounded size and depth, without repeated keys and without NaN."""
    raw = source.encode() if isinstance(source, str) else source
    if len(raw) > most_bytes:
        raise Rejected("too large", f"this JSON is larger than the {most_bytes:,} bytes allowed")
    _check_skeleton(raw, most_depth)
    try:
        return json.loads(raw, object_pairs_hook=_no_repeats, parse_constant=_no_constant)
    except Rejected:
        raise
    except (UnicodeDecodeError, ValueError, RecursionError):
        raise Rejected("schema", "this is not JSON") from None


_LONG_NUMBER = re.compile(rb"[0-9.eE+-]{65}")
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


def _check_skeleton(raw: bytes, most_depth: int) -> None:
    """Reject JSON with too much text outside of strings, too deep nesting, or absurdly long numbers."""
    if raw.count(b"\\") > _MOST_ESCAPES:
        raise Rejected("too large", f"this JSON has more than {_MOST_ESCAPES:,} escapes in its strings")
    if raw.count(b'"') > _MOST_QUOTES:
        raise Rejected("too large", f"this JSON has more than {_MOST_QUOTES:,} quotes")
    skeleton = b"s".join(_outside(raw.split(b'"')))
    if len(skeleton) > MOST_BYTES:
        raise Rejected("too large", f"this JSON has more than {MOST_BYTES:,} bytes outside its strings")
    if _LONG_NUMBER.search(skeleton):
        raise Rejected("schema", "this JSON holds a number of more than 64 characters")
    depth = 0
    for byte in skeleton.translate(None, _NO_BRACKETS):
        depth += 1 if byte in b"[{" else -1
        if depth > most_depth:
            raise Rejected("too deep", f"this JSON is nested deeper than {most_depth} levels")


def _outside(pieces: list[bytes]) -> Iterator[bytes]:
    """Yield the parts of a JSON text that are outside strings; `pieces` is the text split at its quotes.

    This is a Python loop over few pieces on purpose: a regular expression over megabytes would block other threads.
    """
    inside = False
    for piece in pieces:
        if not inside:
            yield piece
            inside = True
        else:  # the quote after this piece ends the string unless an odd number of backslashes stands before it
            inside = bool((len(piece) - len(piece.rstrip(b"\\"))) % 2)


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict from the pairs of a JSON object; reject the text if a key occurs twice."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise Rejected("schema", "an object of this JSON has the same key twice")
    return table


def _no_constant(name: str) -> Any:
    raise Rejected("schema", f"{name} is not a JSON number")
