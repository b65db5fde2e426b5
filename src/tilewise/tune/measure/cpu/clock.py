"""This CPU as a measuring instrument: what it is, a clock for batches, and an eye on everything else that runs.

Time that the process did not spend on the CPU while it should have (others ran, or the host took the core away) is what
spoils a measurement; it is read from the kernel's own accounting, which costs a microsecond.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tilewise import _system
from tilewise._extension import native
from tilewise.errors import UnavailableError
from tilewise.profile.timing.clock import timed_calls
from tilewise.tune.choose.tuned_table import machine_name
from tilewise.tune.measure.sampling import Clock, Run


def require_native() -> Any:
    if native is None:
        raise UnavailableError("There are no tiles to measure: tilewise's compiled kernels are not installed here.")
    return native


def nanoseconds(run: Run, calls: int = 1) -> float:
    """Of a run, in the mean over so many calls."""
    return timed_calls(run, calls) / calls


def one_run(run: Run) -> float:
    """Nanoseconds of a single run, roughly."""
    return max(nanoseconds(run), 500.0)


def in_pieces(run: Run, pieces: int, each: int) -> float:
    """A unit whose runs are timed in pieces of `each`: nanoseconds that all would take at the pace of the fastest.

    Whoever else runs on a machine, on the other threads of a core and in other virtual machines too, slows some pieces
    down and leaves others alone: the fastest of a few differs from one unit to the next by a fraction of a per cent
    where their mean does by several.
    """

    return float(min(timed_calls(run, each) for _ in range(pieces)) * pieces)


class CpuClock(Clock):
    """Times units with the monotonic clock, and knows which share of the time went elsewhere."""

    def __init__(self, threads: int, warm_up_seconds: float = 0.02) -> None:
        self.threads, self.warm_up_seconds = threads, warm_up_seconds
        self._wall = self._own = 0

    def time_units(self, units: Sequence[Run]) -> list[float]:
        now = time.perf_counter_ns
        times = []
        wall, own = now(), time.process_time_ns()
        for unit in units:
            start = now()
            said = unit()
            taken = now() - start
            times.append(said if isinstance(said, float) else float(taken))  # a unit in pieces says so itself
        self._wall += now() - wall
        self._own += time.process_time_ns() - own
        return times

    def each_unit(self, units: Iterable[Run]) -> Iterator[float]:
        for unit in units:
            yield self.time_units([unit])[0]

    def watch(self) -> dict[str, float]:
        """Since the last call, and of the time in `time_units` alone: writing to the store may wait for the disk."""
        # With several threads the process's own time exceeds the wall's; then only the default's readings speak.
        elsewhere = max(0.0, 1 - self._own / max(self._wall, 1)) if self.threads == 1 else 0.0
        self._wall = self._own = 0
        return {"elsewhere": round(elsewhere, 4), "load": round(os.getloadavg()[0], 2)}


@contextlib.contextmanager
def running_on(threads: int) -> Iterator[None]:
    """So many threads in the native kernels, results on pages of their own; a single thread stays on one core, the
    last, where interrupts are rare."""
    module = require_native()
    before, cores = module.num_threads(), os.sched_getaffinity(0)
    module.set_num_threads(threads)
    pooled = module.set_least_pooled(1)
    try:
        if threads == 1:
            os.sched_setaffinity(0, {max(cores)})
        yield
    finally:
        os.sched_setaffinity(0, cores)
        module.set_num_threads(before)
        module.set_least_pooled(pooled)


def describe(*, measure: bool = False) -> dict[str, Any]:
    """What a store keeps of the machine; its ceilings are measured for it if they never were."""
    from tilewise import __version__
    from tilewise.costmodel.features.machine import machine_features

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
