"""Small words in what is printed: plurals, and intervals only where there is one."""

from __future__ import annotations


def counted(number: int, word: str) -> str:
    """1 kernel, 2,000 kernels."""
    return f"{number:,} {word}{'s' * (number != 1)}"


def with_interval(value: str, low: str, high: str) -> str:
    """A figure and its interval, all as they are shown; the figure alone where nothing is seen to vary."""
    return value if low == high else f"{value} ({low} to {high})"
