"""Progress of a long step: a moving bar on a terminal, one plain line now and then in a log, nothing when asked."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
_SECONDS_BETWEEN_LINES = 15.0


def track(items: Iterable[Item], label: str, total: int, shown: bool = True) -> Iterator[Item]:
    """Yield `items`, showing how many of `total` are done."""
    if not shown:
        yield from items
    elif sys.stderr.isatty():
        yield from _bar(items, label, total)
    else:
        yield from _lines(items, label, total)


def _bar(items: Iterable[Item], label: str, total: int) -> Iterator[Item]:
    from rich.console import Console
    from rich.progress import track as rich_track

    yield from rich_track(items, description=label, total=total, console=Console(stderr=True), transient=True)


def _lines(items: Iterable[Item], label: str, total: int) -> Iterator[Item]:
    started = last = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if now - last > _SECONDS_BETWEEN_LINES:
            last = now
            print(f"{label}: {done} of {total}, {now - started:.0f} s", file=sys.stderr, flush=True)
        yield item
