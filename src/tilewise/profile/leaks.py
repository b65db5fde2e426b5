"""Does a function keep more memory with every call? Call it again and again and look at what stays.

After each call garbage is collected and the bytes still held are read. Caches fill and tables double, so the first
calls are thrown away, growth must go on in every part of the rest, and a suspicion is followed by many more calls
before it becomes an alarm. Growth below `_SMALLEST` bytes a call is not called a leak. A leak is reported at the line
of the caller's own code that led to it, not inside the libraries it called.
"""

from __future__ import annotations

import gc
import os
import sysconfig
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.profile.heap import Watch, tracing, watching
from tilewise.profile.timing.statistics import Floats
from tilewise.profile.units import bytes_

_SMALLEST = 64.0
_WARMUP = 8
_FIRST_LOOK = 24
_LONGER_LOOKS = (150, 700)  # past the 128 entries of a default lru_cache, then past the 512 of re's
_MOST_GROWTH = 256 << 20  # a look must not itself fill the machine
_PARTS = 4
_FRAMES = 16


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
        held = _held_after_calls(func, watch, _FIRST_LOOK, deadline)
        calls = _WARMUP + len(held)
        enough = len(held) >= 2 * _PARTS
        growth = _rise_per_call(held) if enough else 0.0  # tables that grow in jumps need a longer look
        for look in _LONGER_LOOKS:
            if growth < _SMALLEST or time.perf_counter() >= deadline:
                break
            longer = _held_after_calls(func, watch, min(look, int(_MOST_GROWTH / growth) + _FIRST_LOOK), deadline)
            calls += len(longer)
            if len(longer) >= _FIRST_LOOK:
                held = longer
            growth = steady_growth(held)
        growth = steady_growth(held)
    if not growth:
        return LeakReport(False, 0.0, calls, enough_calls=enough)
    return LeakReport(True, growth, calls, sites=_growing_sites(func, deadline))


def steady_growth(held: Floats) -> float:
    """Bytes a call if the held bytes keep rising through every part of the series, else 0."""
    if len(held) < 2 * _PARTS:
        return 0.0
    medians = _medians(held)
    rises = np.diff(medians)
    typical = float(np.median(rises))
    if typical < _SMALLEST * len(held) / _PARTS or np.any(rises < 0.25 * typical):
        return 0.0
    return _rise_per_call(held)


def _rise_per_call(held: Floats) -> float:
    medians = _medians(held)
    return float((medians[-1] - medians[0]) / (len(held) / _PARTS * (_PARTS - 1)))


def _medians(held: Floats) -> Floats:
    return np.array([np.median(part) for part in np.array_split(held, _PARTS)])


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
    with _quick_collections(), tracing(_FRAMES):
        func()
        gc.collect()
        before = tracemalloc.take_snapshot()
        done = 0
        while done < calls and (done < 3 or time.perf_counter() < deadline + 1.0):
            func()
            done += 1
        gc.collect()
        after = tracemalloc.take_snapshot()
    grown: dict[str, list[int]] = {}
    for change in after.compare_to(before, "traceback"):
        frame = _callers_line(change.traceback)
        if frame.filename not in (__file__, tracemalloc.__file__):
            total = grown.setdefault(f"{frame.filename}:{frame.lineno}", [0, 0])
            total[0] += change.size_diff
            total[1] += change.count_diff
    sites = [AllocationSite(where, size // done, blocks) for where, (size, blocks) in grown.items()]
    sites = [site for site in sites if site.bytes >= _SMALLEST / 2]
    return sorted(sites, key=lambda site: -site.bytes)[:5]


def _callers_line(trace: tracemalloc.Traceback) -> tracemalloc.Frame:
    """The innermost frame that is in no library; the innermost of all where every one is."""
    for frame in reversed(trace):  # the innermost comes last
        if frame.filename == __file__:
            break
        if not frame.filename.startswith(_LIBRARIES):
            return frame
    return trace[-1]


_LIBRARIES = (
    str(Path(__file__).parents[1]) + os.sep,
    *{path + os.sep for name in ("stdlib", "purelib", "platlib") if (path := sysconfig.get_path(name))},
    "<frozen",
)


# CPython 3.12 counts its immortal objects, some hundreds, among those set aside; a program that freezes what it
# imported has tens of thousands.
IMMORTAL = 5_000


@contextmanager
def _quick_collections() -> Iterator[None]:
    """Set aside the objects that exist already, so that a collection after every call looks at the new ones only."""
    others = gc.get_freeze_count() > IMMORTAL
    gc.collect()
    try:
        gc.freeze()
        yield
    finally:
        if not others:  # there is no giving back of only some
            gc.unfreeze()
