"""Progress of a long loop: a bar on a terminal, a plain line every 15 seconds in a log, nothing if disabled."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
_SECONDS_BETWEEN_LINES = 15.0  # arbitrary: a log of an hour stays under 250 lines


def track(items: Iterable[Item], label: str, total: int, enabled: bool = True) -> Iterator[Item]:
    """Yield `items` and report on stderr how many of `total` are done."""
    if not enabled:
        yield from items
    # A bar redraws its line, which would fill a log file.
    elif sys.stderr.isatty():
        yield from _bar(items, label, total)
    else:
        yield from _lines(items, label, total)


def _bar(items: Iterable[Item], label: str, total: int) -> Iterator[Item]:
    from rich.console import Console
    from rich.progress import track as rich_track

    yield from rich_track(items, description=label, total=total, console=Console(stderr=True), transient=True)


def _lines(items: Iterable[Item], label: str, total: int) -> Iterator[Item]:
    start = last_report = time.monotonic()
    for count, item in enumerate(items):
        now = time.monotonic()
        if now - last_report > _SECONDS_BETWEEN_LINES:
            last_report = now
            print(f"{label}: {count} of {total}, {now - start:.0f} s", file=sys.stderr, flush=True)
        yield item
