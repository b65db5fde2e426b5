"""Text helpers for printed output: plurals, intervals, and ASCII substitutes for terminals without UTF-8."""

from __future__ import annotations

import codecs
from typing import Any

_PLAIN = {
    "×": "x", "→": "->", "…": "...", "–": "-", "µ": "u", "✓": "+", "✗": "x", "·": ".", "“": '"', "”": '"', "’": "'",
    "█": "#", "±": "+-", "≤": "<=", "≥": ">=", "−": "-",
}  # fmt: skip


def pluralize(number: int, word: str) -> str:
    """Format a count with its noun: 1 kernel, 2,000 kernels."""
    return f"{number:,} {word}{'s' * (number != 1)}"


def with_interval(value: str, low: str, high: str) -> str:
    """Format a value with its interval; the value alone if both bounds read the same."""
    return value if low == high else f"{value} ({low} to {high})"


def substitute_unencodable(stream: Any) -> None:
    """Make a stream that is not UTF-8 write ASCII substitutes for characters it cannot encode, instead of failing."""
    if hasattr(stream, "reconfigure") and codecs.lookup(stream.encoding or "ascii").name != "utf-8":
        codecs.register_error("tilewise.plain", _substitute)
        stream.reconfigure(errors="tilewise.plain")


def _substitute(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_PLAIN.get(character, "?") for character in error.object[error.start : error.end]), error.end
