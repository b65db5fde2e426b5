"""Timing on this CPU: its description, a clock for batches, and detection of interference.

A measurement is disturbed if the process did not have the CPU for part of the time (other programs ran, or the host
took the core away). The operating system's accounting reports this at a cost of a microsecond.

The machine as a model sees it (`machine_features`) is the active instruction set (vector lanes, registers), the cache
sizes, one core's share of the shared cache and, if the machine was benchmarked (`tilewise machine`, `tilewise collect
cpu`), peak FLOP/s and bandwidths. All are integers in units that keep them below a billion. 0 means "unknown".
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise import _system
from tilewise._extension import native
from tilewise.profile.timing.clock import timed_calls
from tilewise.tune.choose.tuned_table import machine_name
from tilewise.tune.families.cpu.family import require_native
from tilewise.tune.measure.sampling import Clock, Run

if TYPE_CHECKING:
    from tilewise.profile.machine import MachineFigures

MACHINE_COLUMNS = (
    "machine_lanes", "machine_registers", "machine_cores", "machine_mflops", "machine_l1_kib", "machine_l2_kib",
    "machine_l3_kib", "machine_l3_share_kib", "machine_l1_mbs", "machine_l2_mbs", "machine_l3_mbs",
    "machine_memory_mbs", "machine_page_kib", "machine_large_pages",
)  # fmt: skip
# float32 lanes and vector registers by instruction set.
_LANES = {"avx512": 16, "avx2": 8, "portable": 4}
_REGISTERS = {"avx512": 32}
_DEFAULT_LANES, _DEFAULT_REGISTERS = 4, 16
_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def nanoseconds(run: Run, calls: int = 1) -> float:
    """Return the mean time of `calls` calls in nanoseconds."""
    return timed_calls(run, calls) / calls


def one_run(run: Run) -> float:
    """Return the approximate time of one run in nanoseconds."""
    return max(nanoseconds(run), 500.0)


def time_in_pieces(run: Run, pieces: int, each: int) -> float:
    """Time `pieces` times `each` calls; return the total nanoseconds at the speed of the fastest piece.

    Other programs, also on the sibling thread of a core and in other virtual machines, slow some pieces down and not
    others. The fastest of several pieces varies by a fraction of a per cent, their mean by several per cent.
    """
    return float(min(timed_calls(run, each) for _ in range(pieces)) * pieces)


class CpuClock(Clock):
    """Times units by the monotonic clock, and measures how much of that time other programs had the CPU."""

    def __init__(self, threads: int, warm_up_seconds: float = 0.02) -> None:
        self.threads, self.warm_up_seconds = threads, warm_up_seconds
        self._wall = self._own = 0

    def time_units(self, units: Sequence[Run]) -> list[float]:
        """Run the units one after the other; return the nanoseconds of each."""
        now = time.perf_counter_ns
        times = []
        wall, own = now(), time.process_time_ns()
        for unit in units:
            start = now()
            result = unit()
            elapsed_ns = now() - start
            # `time_in_pieces` returns its own time.
            times.append(result if isinstance(result, float) else float(elapsed_ns))
        self._wall += now() - wall
        self._own += time.process_time_ns() - own
        return times

    def each_unit(self, units: Iterable[Run]) -> Iterator[float]:
        """Yield the nanoseconds of each unit before the next one starts."""
        for unit in units:
            yield self.time_units([unit])[0]

    def watch(self) -> dict[str, float]:
        """Return the disturbance of timings since the last call; waits between timings do not count."""
        # With several threads CPU time exceeds wall time; then only the default's readings reveal a disturbance.
        elsewhere = max(0.0, 1 - self._own / max(self._wall, 1)) if self.threads == 1 else 0.0
        self._wall = self._own = 0
        return {"elsewhere": round(elsewhere, 4), "load": round(os.getloadavg()[0], 2)}


@contextlib.contextmanager
def running_on(threads: int) -> Iterator[None]:
    """Run the block with this number of kernel threads, and with freshly allocated memory for every result.

    A single thread is pinned to the last core, where interrupts are rare.
    """
    module = require_native()
    previous_threads, cores = module.num_threads(), os.sched_getaffinity(0)
    module.set_num_threads(threads)
    previous_pooled = module.set_least_pooled(1)
    try:
        if threads == 1:
            os.sched_setaffinity(0, {max(cores)})
        yield
    finally:
        os.sched_setaffinity(0, cores)
        module.set_num_threads(previous_threads)
        module.set_least_pooled(previous_pooled)


def describe(*, measure: bool = False) -> dict[str, Any]:
    """Describe this machine for a store; with `measure`, unknown peak rates are measured first."""
    from tilewise import __version__

    module = require_native()
    l1, l2, l3 = module.cache_sizes()
    return {
        "name": machine_name(module),
        "isa": module.isa(),
        "cpus": _system.cores(),
        "l1_bytes": l1,
        "l2_bytes": l2,
        "l3_bytes": l3,
        "system": platform.system(),
        "tilewise": __version__,
        "numpy": np.__version__,
        **({"pretended": _system.machine_override_text()} if _system.machine_override_text() else {}),
        "features": machine_features(measure=measure),
    }


def machine_features(*, measure: bool = False) -> dict[str, int]:
    """Return the cost model's machine columns by name, for the active instruction set.

    Peak rates that were never measured are 0, unless `measure` asks to measure them now.
    """
    if native is None:
        return dict.fromkeys(MACHINE_COLUMNS, 0)
    from tilewise.profile.machine import machine

    ceilings, isa = machine() if measure else _stored_ceilings(), str(native.isa())
    lanes = next((lanes for name, lanes in _LANES.items() if isa.startswith(name)), _DEFAULT_LANES)
    registers = next((count for name, count in _REGISTERS.items() if isa.startswith(name)), _DEFAULT_REGISTERS)
    try:  # transparent huge pages: 0 unknown, 1 never, 2 on request or always
        large_pages = 1 if "[never]" in _LARGE_PAGES.read_text(encoding="ascii") else 2
    except OSError:
        large_pages = 0
    values = lanes, registers, _system.cores(), *_cache_features(native, ceilings), mmap.PAGESIZE >> 10, large_pages
    return dict(zip(MACHINE_COLUMNS, values, strict=True))


@functools.cache
def _stored_ceilings() -> MachineFigures | None:
    """Return the stored peak rates of this machine, read once per process; None if never measured."""
    from tilewise.profile.machine import cached_machine

    return cached_machine()


def _cache_features(module: Any, ceilings: MachineFigures | None) -> tuple[int, ...]:
    """Return one thread's MFLOP/s, cache sizes and L3 share in KiB, and read bandwidth from each level in MB/s."""
    l1, l2, l3 = (int(size) for size in module.cache_sizes())
    peak = round(ceilings.peak(1) / 1e6) if ceilings is not None else 0
    # Half of a cache fits it for certain; 1 TiB stands for main memory.
    working_sets = (l1 // 2, l2 // 2, min(l3 // 2, 16 << 20), 1 << 40)
    rates = [0 if ceilings is None else round(ceilings.read_bandwidth(size) / 1e6) for size in working_sets]
    return peak, l1 >> 10, l2 >> 10, l3 >> 10, int(module.l3_share()) >> 10, *rates
