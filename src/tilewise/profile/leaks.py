"""Does a function keep more memory with every call? Call it again and again and look at what stays.

After each call garbage is collected and the bytes still held are read. Caches fill and tables double, so the first
calls are thrown away, growth must go on in every part of the rest, and a suspicion is followed by many more calls
before it becomes an alarm. Growth below `_SMALLEST` bytes a call is not called a leak.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewise.profile.heap import Watch, tracing, watching
from tilewise.profile.statistics import Floats
from tilewise.profile.units import bytes_

_SMALLEST = 64.0
_WARMUP = 8
_FIRST_LOOK = 24
_SECOND_LOOK = 150  # longer than the 128 entries of a default lru_cache
_PARTS = 4


@dataclass(frozen=True)
class AllocationSite:
    """A source line and the bytes it holds."""

    where: str
    bytes: int
    blocks: int

    def __str__(self) -> str:
        return f"{self.where}: {bytes_(self.bytes)} in {self.blocks} blocks"


@dataclass(frozen=True)
class LeakReport:
    """What repetition showed. `bytes_per_call` is 0 where nothing grows."""

    leaking: bool
    bytes_per_call: float
    calls: int
    enough_calls: bool = True
    sites: list[AllocationSite] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.enough_calls:
            return f"too few calls fitted into the time to look for a leak ({self.calls})"
        if not self.leaking:
            return f"no leak in {self.calls} calls"
        where = f", from {self.sites[0].where}" if self.sites else ""
        return f"leak: {bytes_(self.bytes_per_call)} stay after every call ({self.calls} calls{where})"


def find_leak(func: Callable[[], Any], seconds: float = 10.0) -> LeakReport:
    """Repeat `func` for at most about `seconds` and judge whether memory grows without end."""
    deadline = time.perf_counter() + seconds
    with _quick_collections(), watching() as watch:
        _held_after_calls(func, watch, _WARMUP, deadline)
        first = _held_after_calls(func, watch, _FIRST_LOOK, deadline)
        growth = steady_growth(first)
        calls = _WARMUP + len(first)
        if growth and time.perf_counter() < deadline:
            longer = _held_after_calls(func, watch, _SECOND_LOOK, deadline)
            calls += len(longer)
            if len(longer) >= _FIRST_LOOK:
                growth = steady_growth(longer)
    if not growth:
        return LeakReport(False, 0.0, calls, enough_calls=len(first) >= 2 * _PARTS)
    return LeakReport(True, growth, calls, sites=_growing_sites(func, deadline))


def steady_growth(held: Floats) -> float:
    """Bytes a call if the held bytes keep rising through every part of the series, else 0."""
    if len(held) < 2 * _PARTS:
        return 0.0
    parts = np.array_split(held, _PARTS)
    rises = np.diff([np.median(part) for part in parts])
    size = len(held) / _PARTS
    slope = float(np.median(rises) / size)
    if slope < _SMALLEST or np.any(rises < 0.25 * np.median(rises)):
        return 0.0
    return float((np.median(parts[-1]) - np.median(parts[0])) / (size * (_PARTS - 1)))


def _held_after_calls(func: Callable[[], Any], watch: Watch, calls: int, deadline: float) -> Floats:
    held = np.zeros(calls)
    for i in range(calls):
        func()
        gc.collect()
        held[i] = watch.requested_now()
        if time.perf_counter() > deadline:
            return held[: i + 1]
    return held


def _growing_sites(func: Callable[[], Any], deadline: float, calls: int = 20) -> list[AllocationSite]:
    """The lines whose memory grew over some more calls."""
    with _quick_collections(), tracing(1):
        func()
        gc.collect()
        before = tracemalloc.take_snapshot()
        done = 0
        while done < calls and (done < 3 or time.perf_counter() < deadline + 1.0):
            func()
            done += 1
        gc.collect()
        after = tracemalloc.take_snapshot()
    grown = [d for d in after.compare_to(before, "lineno") if d.size_diff >= done * _SMALLEST / 2]
    grown = [d for d in grown if d.traceback[0].filename not in (__file__, tracemalloc.__file__)]
    grown.sort(key=lambda d: -d.size_diff)
    return [
        AllocationSite(f"{d.traceback[0].filename}:{d.traceback[0].lineno}", d.size_diff // done, d.count_diff)
        for d in grown[:5]
    ]


@contextmanager
def _quick_collections() -> Iterator[None]:
    """Set aside the objects that exist already, so that a collection after every call looks at the new ones only."""
    gc.collect()
    try:
        gc.freeze()
        yield
    finally:
        gc.unfreeze()
