"""JSON from strangers, and JSON in one spelling.

Size and nesting are looked at before the parser runs, so a bomb of a million brackets costs one pass over its bytes.
`canonical` writes a value in exactly one way, which is what hashes are taken of.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tilewise.bench.errors import Rejected

MOST_BYTES = 64 << 10
MOST_DEPTH = 12


def canonical(value: Any) -> bytes:
    """JSON in one spelling only: sorted keys, no spaces, ASCII, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def parse_json(source: bytes | str, most_bytes: int = MOST_BYTES, most_depth: int = MOST_DEPTH) -> Any:
    """JSON of bounded size and depth, without repeated keys and without NaN."""
    raw = source.encode() if isinstance(source, str) else source
    if len(raw) > most_bytes:
        raise Rejected("too large", f"this JSON is larger than the {most_bytes:,} bytes allowed")
    if _depth(raw, most_depth) > most_depth:
        raise Rejected("too deep", f"this JSON is nested deeper than {most_depth} levels")
    try:
        return json.loads(raw, object_pairs_hook=_no_repeats, parse_constant=_no_constant)
    except Rejected:
        raise
    except (UnicodeDecodeError, ValueError, RecursionError):
        raise Rejected("schema", "this is not JSON") from None


_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_MOST_BRACKETS = 100_000


def _depth(raw: bytes, stop_at: int) -> int:
    """How deep brackets nest outside of strings; counting ends where that exceeds `stop_at`."""
    depth = deepest = 0
    brackets = _STRINGS.sub(b"", raw).translate(None, _NO_BRACKETS)
    if len(brackets) > _MOST_BRACKETS:
        raise Rejected("too large", f"this JSON has more than {_MOST_BRACKETS:,} brackets")
    for byte in brackets:
        if byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
            if deepest > stop_at:
                return deepest
        elif byte in b"]}":
            depth -= 1
    return deepest


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise Rejected("schema", "a key stands twice in one object of this JSON")
    return table


def _no_constant(name: str) -> Any:
    raise Rejected("schema", f"{name} is not a number that JSON knows")
