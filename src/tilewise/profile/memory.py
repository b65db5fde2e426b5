"""MemoryProfiler: how much memory a function needs at its peak, what it keeps, who asked for it, and whether it leaks.

The peak is counted, not sampled: every block the process takes while the function runs is entered into a ledger,
NumPy's arrays and the native kernels' workspaces included (heap.py). The function is run once for the figures, once
more for the sources of the peak, and repeatedly to look for a leak.
"""

from __future__ import annotations

import contextlib
import gc
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from tilewise._extension import native
from tilewise.profile import heap
from tilewise.profile.heap import Counts, native_peak, tracing, watching
from tilewise.profile.leaks import AllocationSite, LeakReport, find_leak
from tilewise.profile.timer import check_limit
from tilewise.profile.timing.limits import MeasurementError, TimeIsUp, TimeLimitError, time_limit
from tilewise.profile.units import bytes_

_MOST_SITES = 10


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes a function took, beyond what the process held before.

    `peak_bytes` is the larger of two views of the same run: `system_peak_bytes`, what was taken from malloc and mmap
    (Python's small objects as the 1 MiB arenas they live in), and `requested_peak_bytes`, what was asked for, object by
    object. The first misses objects that fit into arenas the process had already, the second misses rounding.
    `net_bytes` is what stayed after the function had returned and its result was let go, `result_bytes` what the
    result held, `native_peak_bytes` the part our kernels took for workspaces and packed weights.
    """

    peak_bytes: int
    net_bytes: int
    system_peak_bytes: int
    requested_peak_bytes: int
    native_peak_bytes: int
    result_bytes: int
    blocks: int
    sites: list[AllocationSite]
    leak: LeakReport | None
    method: str
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"peak {bytes_(self.peak_bytes)}, kept {bytes_(self.net_bytes)} (native kernels up to "
            f"{bytes_(self.native_peak_bytes)}; counted: {self.method})"
        ]
        lines += [f"  {site}" for site in self.sites]
        lines += [str(self.leak)] if self.leak else []
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class MemoryProfiler:
    """Profiles memory.

    >>> import numpy as np
    >>> profile = MemoryProfiler().profile(lambda: np.ones(1_000_000).sum())
    >>> 8_000_000 <= profile.peak_bytes < 8_100_000
    True

    The function is called once for the peak; `leaks=True` calls it some thirty times more (within `leak_seconds`),
    `sites=True` once or twice more. Only what runs before `time_limit` seconds are over is looked at.
    """

    time_limit: float = 120.0
    leak_seconds: float = 10.0

    def profile(
        self, func: Callable[[], Any], *, warmup: int = 0, sites: bool = True, leaks: bool = True
    ) -> MemoryProfile:
        """Call `func()` and account for its memory. `warmup` calls before it fill caches that should not count."""
        limit = check_limit(self.time_limit)
        with _guarded(limit):
            for _ in range(warmup):
                func()
            own = _measure(_nothing)
            figures = _measure(func)
            found = _sites_at_peak(func, figures.after_call.requested_peak) if sites else []
            leak = find_leak(func, self.leak_seconds) if leaks else None
        return _profile(figures, own, found, leak)


@dataclass(frozen=True)
class _Figures:
    after_call: Counts
    after_letting_go: Counts
    native_peak: int
    method: str
    sees_everything: bool


def _measure(func: Callable[[], Any]) -> _Figures:
    gc.collect()
    native_before = int(native.memory_in_use()) if native is not None else 0
    with watching() as watch:
        result = func()
        after_call = watch.counts()
        del result
        gc.collect()
        after_letting_go = watch.counts()
        kernels = max(native_peak() - native_before, 0)
        return _Figures(after_call, after_letting_go, kernels, watch.method, watch.sees_everything)


def _nothing() -> None:
    """What is counted for this is the profiler's own."""


def _profile(figures: _Figures, own: _Figures, sites: list[AllocationSite], leak: LeakReport | None) -> MemoryProfile:
    at_peak, in_the_end = figures.after_call, figures.after_letting_go
    requested_peak = max(at_peak.requested_peak - own.after_call.requested_peak, 0)
    system_peak = max(at_peak.system_peak - own.after_call.system_peak, 0)
    notes = []
    if not figures.sees_everything and figures.native_peak:
        notes.append(f"buffers of the native kernels, up to {bytes_(figures.native_peak)}, are not in the peak")
    return MemoryProfile(
        peak_bytes=max(system_peak, requested_peak),
        net_bytes=in_the_end.requested_now - own.after_letting_go.requested_now,
        system_peak_bytes=system_peak,
        requested_peak_bytes=requested_peak,
        native_peak_bytes=figures.native_peak,
        result_bytes=max(at_peak.requested_now - in_the_end.requested_now, 0),
        blocks=at_peak.blocks,
        sites=sites,
        leak=leak,
        method=figures.method,
        notes=notes,
    )


def _sites_at_peak(func: Callable[[], Any], peak: int) -> list[AllocationSite]:
    """The lines that hold the memory at the peak.

    A second run under tracemalloc: when the bytes come near the first run's peak, the heap watch queues a snapshot,
    which is taken at the next safe point of the interpreter. Without the watch, what the result holds has to do.
    """
    snapshots: list[tracemalloc.Snapshot] = []
    with tracing(1):
        with watching() as watch:
            if watch.sees_everything and native is not None:
                native.watch_alarm(max(int(0.97 * peak), 1), lambda: snapshots.append(tracemalloc.take_snapshot()))
            try:
                result = func()
            finally:
                if native is not None:
                    native.watch_alarm(0, None)
        if not snapshots:
            snapshots.append(tracemalloc.take_snapshot())
        del result
    return _largest(snapshots[0])


def _largest(snapshot: tracemalloc.Snapshot) -> list[AllocationSite]:
    own = (tracemalloc.__file__, __file__, heap.__file__, contextlib.__file__)
    rows = [s for s in snapshot.statistics("lineno") if s.traceback[0].filename not in own]
    least = sum(row.size for row in rows) / 100  # what is below a hundredth is not worth a line
    rows = [row for row in rows if row.size >= least]
    return [
        AllocationSite(f"{s.traceback[0].filename}:{s.traceback[0].lineno}", s.size, s.count)
        for s in rows[:_MOST_SITES]
    ]


@contextlib.contextmanager
def _guarded(limit: float) -> Iterator[None]:
    """A time limit, and one sentence for a function that raises or never ends."""
    try:
        with time_limit(limit):
            yield
    except TimeIsUp:
        raise TimeLimitError(
            f"the function had not been profiled when its {limit:g} s were over; give a larger time_limit"
        ) from None
    except Exception as error:
        raise MeasurementError(f"the function raised {type(error).__name__}: {error}") from error
