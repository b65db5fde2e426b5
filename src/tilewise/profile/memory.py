"""MemoryProfiler: a function's peak memory, what it retains, which lines allocate it, and whether it leaks.

The peak is exact, not sampled: every allocation of the process is counted while the function runs, including NumPy's
arrays and the workspaces of native kernels (leaks.py). The function runs once for the peak, once more for the source
lines at the peak, and repeatedly to look for a leak.
"""

from __future__ import annotations

import contextlib
import gc
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from tilewise._extension import native
from tilewise.backend.instance_methods import ExplainsMethods
from tilewise.profile import leaks
from tilewise.profile.leaks import (
    AllocationSite,
    Counts,
    LeakReport,
    find_leak,
    trace_allocations,
    watch_heap,
)
from tilewise.profile.timer import check_limit
from tilewise.profile.timing.limits import MeasurementError, TimeIsUp, TimeLimitError, time_limit
from tilewise.profile.units import bytes_

_MAX_SITES = 10


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes a function allocated beyond what the process already used.

    `peak_bytes` is the larger of two counters for the same run: `system_peak_bytes`, bytes taken from malloc and mmap
    (Python's small objects count as the 1 MiB arenas that contain them), and `requested_peak_bytes`, the sum of
    requested sizes. The first misses objects that fit into existing arenas, the second misses rounding. `net_bytes` is
    what remains after the function has returned and its result was deleted, `result_bytes` the size of the result,
    `native_peak_bytes` the share of the native kernels' workspaces and packed weights.
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
            f"peak {bytes_(self.peak_bytes)}, retained {bytes_(self.net_bytes)} (native kernels up to "
            f"{bytes_(self.native_peak_bytes)}; counted: {self.method})"
        ]
        lines += [f"  {site}" for site in self.sites]
        lines += [str(self.leak)] if self.leak else []
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class MemoryProfiler(metaclass=ExplainsMethods):
    """Measures the memory of functions.

    >>> import numpy as np
    >>> profile = MemoryProfiler().profile(lambda: np.ones(1_000_000).sum())
    >>> 8_000_000 <= profile.peak_bytes < 8_100_000
    True

    The function is called once for the peak; `leaks=True` adds about thirty calls (within `leak_seconds`),
    `sites=True` one more. The whole profile raises TimeLimitError after `time_limit` seconds.
    """

    time_limit: float = 120.0
    leak_seconds: float = 10.0

    def profile(
        self, func: Callable[[], Any], *, warmup: int = 0, sites: bool = True, leaks: bool = True
    ) -> MemoryProfile:
        """Call `func()` and measure its memory, after `warmup` calls that fill caches.

        `sites` finds the source lines that hold memory at the peak, `leaks` tests whether memory grows with every call.
        """
        limit = check_limit(self.time_limit)
        if not callable(func):
            raise MeasurementError(f"MemoryProfiler.profile needs a function to call, not {type(func).__name__}")
        with _guarded(limit):
            for _ in range(warmup):
                func()
            overhead = _measure(lambda: None)  # of the profiler itself
            usage = _measure(func)
            largest = _sites_at_peak(func, usage.after_call.requested_peak) if sites else []
            leak = find_leak(func, self.leak_seconds) if leaks else None
        return _profile(usage, overhead, largest, leak)


@dataclass(frozen=True)
class _Usage:
    """Allocation counters of one call, before and after its result is deleted."""

    after_call: Counts
    after_delete: Counts
    native_peak: int
    method: str
    sees_everything: bool


def _measure(func: Callable[[], Any]) -> _Usage:
    """Call `func` once; return the allocation counters after it and after deleting its result."""
    gc.collect()
    # Workspaces of earlier calls are still allocated; only what exceeds them belongs to this call.
    native_before = int(native.memory_in_use()) if native is not None else 0
    with watch_heap() as watch:
        result = func()
        after_call = watch.counts()
        del result
        gc.collect()
        after_delete = watch.counts()
        kernels = max(int(native.memory_peak()) - native_before, 0) if native is not None else 0
        return _Usage(after_call, after_delete, kernels, watch.method, watch.sees_everything)


def _profile(usage: _Usage, overhead: _Usage, sites: list[AllocationSite], leak: LeakReport | None) -> MemoryProfile:
    """Build the memory profile from a call's counters, less the profiler's own overhead."""
    after_call, after_delete = usage.after_call, usage.after_delete
    requested_peak = max(after_call.requested_peak - overhead.after_call.requested_peak, 0)
    system_peak = max(after_call.system_peak - overhead.after_call.system_peak, 0)
    notes = []
    if not usage.sees_everything and usage.native_peak:
        notes.append(f"the peak excludes workspaces of native kernels, up to {bytes_(usage.native_peak)}")
    return MemoryProfile(
        peak_bytes=max(system_peak, requested_peak),
        net_bytes=after_delete.requested_now - overhead.after_delete.requested_now,
        system_peak_bytes=system_peak,
        requested_peak_bytes=requested_peak,
        native_peak_bytes=usage.native_peak,
        result_bytes=max(after_call.requested_now - after_delete.requested_now, 0),
        blocks=after_call.blocks,
        sites=sites,
        leak=leak,
        method=usage.method,
        notes=notes,
    )


def _sites_at_peak(func: Callable[[], Any], peak: int) -> list[AllocationSite]:
    """Return the source lines whose memory is live when the function's memory is at its peak.

    The function runs again under tracemalloc. When its bytes approach the first run's peak, the heap watch requests a
    snapshot, which is taken at the next safe point of the interpreter. Without the heap watch the snapshot is taken
    after the call and shows only what the result holds.
    """
    snapshots: list[tracemalloc.Snapshot] = []
    with trace_allocations(1):
        with watch_heap() as watch:
            if watch.sees_everything and native is not None:
                # 0.97: a repeated run rarely reaches exactly the same peak.
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
    """Return the allocation sites with at least 1 % of the snapshot's bytes, largest first."""
    profiler_files = (tracemalloc.__file__, __file__, leaks.__file__, contextlib.__file__)
    rows = [s for s in snapshot.statistics("lineno") if s.traceback[0].filename not in profiler_files]
    threshold = sum(row.size for row in rows) / 100
    rows = [row for row in rows if row.size >= threshold]
    return [
        AllocationSite(f"{s.traceback[0].filename}:{s.traceback[0].lineno}", s.size, s.count) for s in rows[:_MAX_SITES]
    ]


@contextlib.contextmanager
def _guarded(limit: float) -> Iterator[None]:
    """Run the block with a time limit in seconds; a function that raises or hangs is a MeasurementError."""
    try:
        with time_limit(limit):
            yield
    except TimeIsUp:
        raise TimeLimitError(f"profiling the function took longer than {limit:g} s; give a larger time_limit") from None
    except Exception as error:
        raise MeasurementError(f"the function raised {type(error).__name__}: {error}") from error
