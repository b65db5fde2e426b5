"""Small words in what is printed: plurals, intervals where there is one, and signs for terminals that lack ours."""

from __future__ import annotations

import codecs
from typing import Any

_PLAIN = {
    "×": "x", "→": "->", "…": "...", "–": "-", "µ": "u", "✓": "+", "✗": "x", "·": ".", "“": '"', "”": '"', "’": "'",
    "█": "#", "±": "+-", "≤": "<=", "≥": ">=", "−": "-",
}  # fmt: skip


def counted(number: int, word: str) -> str:
    """1 kernel, 2,000 kernels."""
    return f"{number:,} {word}{'s' * (number != 1)}"


def with_interval(value: str, low: str, high: str) -> str:
    """A figure and its interval, all as they are shown; the figure alone where nothing is seen to vary."""
    return value if low == high else f"{value} ({low} to {high})"


def spell_out(stream: Any) -> None:
    """Let a stream that is not UTF-8 write what its encoding has no sign for in letters instead of failing."""
    if hasattr(stream, "reconfigure") and codecs.lookup(stream.encoding or "ascii").name != "utf-8":
        codecs.register_error("tilewise.plain", _spelt_out)
        stream.reconfigure(errors="tilewise.plain")


def _spelt_out(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_PLAIN.get(sign, "?") for sign in error.object[error.start : error.end]), error.end
