"""Leak detection: call a function repeatedly and check whether its live memory keeps growing.

After each call garbage is collected and the live bytes are read. Caches fill up and hash tables double, so the first
calls are ignored, growth must continue in every quarter of the remaining calls, and a suspected leak is confirmed with
many more calls before it is reported. Growth below `_MIN_LEAK_BYTES` per call is not reported. A leak is attributed to
a line of the caller's own code, not to a line inside a library.
"""

from __future__ import annotations

import gc
import itertools
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

from tilewise._extension import native
from tilewise.profile.timing.statistics import Floats
from tilewise.profile.units import bytes_

_MIN_LEAK_BYTES = 64.0  # per call; about one small Python object
_WARMUP_CALLS = 8  # arbitrary; fills caches of a few entries
_FIRST_CALLS = 24  # arbitrary; six calls per segment
_CONFIRMATION_CALLS = (150, 700)  # above the 128 entries of a default lru_cache, then above the 512 of re's cache
_MAX_GROWTH_BYTES = 256 << 20  # the search for a leak must not fill the machine's memory
_SEGMENTS = 4  # growth has to continue in each quarter of the series
_FRAMES = 16  # depth of the recorded tracebacks


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
    """Result of the leak search. `bytes_per_call` is 0 if memory does not grow."""

    leaking: bool
    bytes_per_call: float
    calls: int
    enough_calls: bool = True
    sites: list[AllocationSite] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.enough_calls:
            return f"only {self.calls} calls finished in time, too few to detect a leak"
        if not self.leaking:
            return f"no leak in {self.calls} calls"
        where = f", from {self.sites[0].where}" if self.sites else ", from no line of your code"
        return f"leak: memory grows by {bytes_(self.bytes_per_call)} per call ({self.calls} calls{where})"


def find_leak(func: Callable[[], Any], seconds: float = 10.0) -> LeakReport:
    """Call `func` repeatedly, for about `seconds`, and report whether its live memory keeps growing."""
    deadline = time.perf_counter() + seconds
    with _quick_collections(), watch_heap() as watch:
        _live_bytes_after_calls(func, watch, _WARMUP_CALLS, deadline)
        live_bytes = _live_bytes_after_calls(func, watch, _FIRST_CALLS, deadline)
        calls = _WARMUP_CALLS + len(live_bytes)
        enough = len(live_bytes) >= 2 * _SEGMENTS
        # Any rise is suspicious at first, because tables that double grow in jumps; longer series decide.
        growth = _rise_per_call(live_bytes) if enough else 0.0
        for more_calls in _CONFIRMATION_CALLS:
            if growth < _MIN_LEAK_BYTES or time.perf_counter() >= deadline:
                break
            more_calls = min(more_calls, int(_MAX_GROWTH_BYTES / growth) + _FIRST_CALLS)
            longer = _live_bytes_after_calls(func, watch, more_calls, deadline)
            calls += len(longer)
            if len(longer) >= _FIRST_CALLS:
                live_bytes = longer
            growth = steady_growth(live_bytes)
        growth = steady_growth(live_bytes)
        # Growth of small objects is a leak only if the confirmation calls had time to finish.
        if growth < 64 * _MIN_LEAK_BYTES and len(live_bytes) < _CONFIRMATION_CALLS[0]:
            enough, growth = enough and not growth, 0.0
    if not growth:
        return LeakReport(False, 0.0, calls, enough_calls=enough)
    return LeakReport(True, growth, calls, sites=_growing_sites(func, deadline))


def steady_growth(live_bytes: Floats) -> float:
    """Return the growth in bytes per call if live memory rises in every segment of the series, else 0."""
    if len(live_bytes) < 2 * _SEGMENTS:
        return 0.0
    rises = np.diff(_medians(live_bytes)) - _largest_steps(live_bytes)
    typical = float(np.median(rises))
    if typical < _MIN_LEAK_BYTES * len(live_bytes) / _SEGMENTS or np.any(rises < 0.25 * typical):
        return 0.0
    return _rise_per_call(live_bytes)


def _largest_steps(live_bytes: Floats) -> Floats:
    """Return the largest rise in live bytes by a single call, between the middles of consecutive segments.

    A hash table that doubles once looks like growth from one segment to the next; a leak grows again and again.
    """
    segments = np.array_split(np.arange(len(live_bytes)), _SEGMENTS)
    middles = [int(segment[len(segment) // 2]) for segment in segments]
    steps = np.maximum(np.diff(live_bytes), 0.0)
    return np.array([steps[start:end].max() for start, end in itertools.pairwise(middles)])


def _rise_per_call(live_bytes: Floats) -> float:
    """Return the bytes gained per call, between the medians of the first and the last segment."""
    medians = _medians(live_bytes)
    return float((medians[-1] - medians[0]) / (len(live_bytes) / _SEGMENTS * (_SEGMENTS - 1)))


def _medians(live_bytes: Floats) -> Floats:
    """Return the median of each segment of the series, on which single disturbed calls have no effect."""
    return np.array([np.median(segment) for segment in np.array_split(live_bytes, _SEGMENTS)])


def _live_bytes_after_calls(func: Callable[[], Any], watch: HeapWatch, calls: int, deadline: float) -> Floats:
    """Return the live bytes after each of up to `calls` calls; fewer if the deadline passes."""
    live_bytes = np.zeros(calls)
    for i in range(calls):
        func()
        gc.collect()
        live_bytes[i] = watch.counts().requested_now
        if time.perf_counter() > deadline:
            return live_bytes[: i + 1]
    return live_bytes


def _growing_sites(func: Callable[[], Any], deadline: float, calls: int = 20) -> list[AllocationSite]:
    """Call the function some more and return the five source lines whose memory grew most."""
    with _quick_collections(), trace_allocations(_FRAMES):
        func()
        gc.collect()
        before = tracemalloc.take_snapshot()
        completed = 0
        while completed < calls and (completed < 3 or time.perf_counter() < deadline + 1.0):
            func()
            completed += 1
        gc.collect()
        after = tracemalloc.take_snapshot()
    growth_by_line: dict[str, list[int]] = {}
    for difference in after.compare_to(before, "traceback"):
        frame = _callers_line(difference.traceback)
        if frame is not None:
            total = growth_by_line.setdefault(f"{frame.filename}:{frame.lineno}", [0, 0])
            total[0] += difference.size_diff
            total[1] += difference.count_diff
    sites = [AllocationSite(where, size // completed, blocks) for where, (size, blocks) in growth_by_line.items()]
    sites = [site for site in sites if site.bytes >= _MIN_LEAK_BYTES / 2]
    return sorted(sites, key=lambda site: -site.bytes)[:5]


def _callers_line(trace: tracemalloc.Traceback) -> tracemalloc.Frame | None:
    """Return the innermost frame of the traceback outside of libraries; None if there is none."""
    for frame in reversed(trace):  # tracemalloc lists the innermost frame last
        if frame.filename == __file__:
            break
        if not frame.filename.startswith(_LIBRARIES):
            return frame
    return None


_LIBRARIES = (
    str(Path(__file__).parents[1]) + os.sep,
    *{path + os.sep for name in ("stdlib", "purelib", "platlib") if (path := sysconfig.get_path(name))},
    "<frozen",
)


# CPython 3.12 includes its few hundred immortal objects in gc.get_freeze_count(); a program that froze its imports
# has tens of thousands. A larger count means that the caller froze objects, which must then stay frozen.
IMMORTAL = 5_000


@contextmanager
def _quick_collections() -> Iterator[None]:
    """Freeze existing objects inside the block, so that garbage collection visits only new ones."""
    frozen_by_caller = gc.get_freeze_count() > IMMORTAL
    gc.collect()
    try:
        gc.freeze()
        yield
    finally:
        if not frozen_by_caller:  # gc.unfreeze releases all objects, also those the caller froze
            gc.unfreeze()


# --- watch of the heap ---


@dataclass(frozen=True)
class Counts:
    """Bytes allocated since the watch began and not freed: current and peak.

    `system` counts bytes taken from malloc and mmap, `requested` the sizes that callers asked for.
    """

    system_now: int
    system_peak: int
    requested_now: int
    requested_peak: int
    blocks: int


class HeapWatch:
    """Reads the native counters of allocated bytes."""

    method = "every allocation in the process, native ones included (heap watch)"
    sees_everything = True

    def counts(self) -> Counts:
        assert native is not None
        return Counts(*native.watch_counts())


class TracemallocHeapWatch(HeapWatch):
    """Reads tracemalloc's counters of allocated bytes."""

    method = "Python objects and NumPy arrays only (tracemalloc): the extension's heap watch is not available"
    sees_everything = False

    def __init__(self) -> None:
        self._start = tracemalloc.get_traced_memory()[0]

    def counts(self) -> Counts:
        now, peak = (value - self._start for value in tracemalloc.get_traced_memory())
        return Counts(now, peak, now, peak, 0)


@contextmanager
def watch_heap() -> Iterator[HeapWatch]:
    """Count allocations inside the block; yields a reader of the counts. A nested watch uses tracemalloc."""
    if native is not None and not native.watch_active():
        try:  # includes the start: a time limit may raise while it runs
            if native.watch_start():
                native.reset_memory_peak()
                yield HeapWatch()
                return
        finally:
            native.watch_stop()
    with trace_allocations():
        tracemalloc.reset_peak()
        yield TracemallocHeapWatch()


@contextmanager
def trace_allocations(frames: int = 1) -> Iterator[None]:
    """Run the block with tracemalloc on; turn it off afterwards unless it was already on."""
    was_tracing = tracemalloc.is_tracing()
    try:
        if not was_tracing:
            tracemalloc.start(frames)
        yield
    finally:
        if not was_tracing:
            tracemalloc.stop()
