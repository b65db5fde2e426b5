"""Counting bytes: the extension's heap watch where there is one, tracemalloc elsewhere, behind one small interface.

The heap watch sees every block that any library takes (NumPy, BLAS, our kernels) and keeps two sums; native/common/
heap_watch.h says which. tracemalloc sees Python's objects and NumPy's arrays only, and the profile says so.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tilewise._extension import native


@dataclass(frozen=True)
class Counts:
    """Bytes taken since the watch began and not given back: now, and at most."""

    system_now: int
    system_peak: int
    requested_now: int
    requested_peak: int
    blocks: int


class Watch:
    """A running count of bytes."""

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


class TracemallocWatch(Watch):
    """What the standard library can see."""

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
def watching() -> Iterator[Watch]:
    """Count until the block ends. A watch inside another one falls back to tracemalloc."""
    if native is not None and not native.watch_active():
        try:  # around the start as well: a time limit may strike while it is under way
            if native.watch_start():
                native.reset_memory_peak()
                yield Watch()
                return
        finally:
            native.watch_stop()
    with tracing():
        tracemalloc.reset_peak()
        yield TracemallocWatch()


@contextmanager
def tracing(frames: int = 1) -> Iterator[None]:
    """tracemalloc on, and off again unless somebody had it on before."""
    had_it = tracemalloc.is_tracing()
    try:
        if not had_it:
            tracemalloc.start(frames)
        yield
    finally:
        if not had_it:
            tracemalloc.stop()


def native_peak() -> int:
    """The most our kernels held in buffers of their own since the watch began."""
    return int(native.memory_peak()) if native is not None else 0
