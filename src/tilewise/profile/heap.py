"""Count allocated bytes with the extension's heap watch, or with tracemalloc if the extension is not installed.

The heap watch counts every block that any library allocates (NumPy, BLAS, our kernels); native/common/heap_watch.h
defines its two counters. tracemalloc counts Python objects and NumPy arrays only, and the profile says so.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tilewise._extension import native


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

    def requested_now(self) -> int:
        assert native is not None
        return int(native.watch_counts()[2])

    def reset_peaks(self) -> None:
        assert native is not None
        native.watch_reset_peaks()
        native.reset_memory_peak()


class TracemallocHeapWatch(HeapWatch):
    """Reads tracemalloc's counters of allocated bytes."""

    method = "Python objects and NumPy arrays only (tracemalloc): the extension's heap watch is not available"
    sees_everything = False

    def __init__(self) -> None:
        self._start = tracemalloc.get_traced_memory()[0]

    def counts(self) -> Counts:
        now, peak = (value - self._start for value in tracemalloc.get_traced_memory())
        return Counts(now, peak, now, peak, 0)

    def requested_now(self) -> int:
        return tracemalloc.get_traced_memory()[0] - self._start

    def reset_peaks(self) -> None:
        tracemalloc.reset_peak()


@contextmanager
def watch_heap() -> Iterator[HeapWatch]:
    """Count allocations until the `with` block ends. A nested watch falls back to tracemalloc."""
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


def native_peak() -> int:
    """Peak bytes of the native kernels' workspaces since the watch began."""
    return int(native.memory_peak()) if native is not None else 0
