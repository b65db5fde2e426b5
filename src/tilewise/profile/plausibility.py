"""Plausibility checks for measured peak rates. Each check yields a sentence for every problem it finds.

A peak rate that is too low makes every program look better than it is, for as long as it is cached. Rates that
contradict each other, or that were measured while other processes were busy, are shown with a warning and not cached.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tilewise.profile.timing.stability import MachineReading, machine_reasons

if TYPE_CHECKING:
    from tilewise.profile.machine import MachineFigures

# Additional threads may share a core's arithmetic units or the memory bus and then gain nothing, but a rate below
# these fractions of the rate with fewer threads means that the measurement was disturbed.
_MIN_SCALING, _MIN_MEMORY_SCALING = 0.9, 0.75
# Twice the threads reach at most twice the rate; the margin allows for a change of the clock frequency.
_MAX_SCALING_PER_THREAD = 1.3
# FLOP/s or bytes/s per core: the slowest CPU is above the first, the fastest below a quarter of the second.
_PLAUSIBLE_RATE_PER_CORE = (1e8, 2e12)


def find_doubts(machine: MachineFigures, before: MachineReading, after: MachineReading) -> list[str]:
    """Reasons not to cache these rates: contradictions first, then the machine's load during the measurement."""
    return [*contradictions(machine), *machine_reasons(before, after)]


def contradictions(machine: MachineFigures) -> list[str]:
    """Rates that are impossible or contradict each other, one sentence each."""
    return [*_impossible_rates(machine), *_implausible_scaling(machine), *_slow_caches(machine)]


def _impossible_rates(machine: MachineFigures) -> Iterator[str]:
    """Rates per core outside the range of any CPU."""
    lowest, highest = _PLAUSIBLE_RATE_PER_CORE
    for peak in machine.peaks:
        if not lowest <= peak.flops_per_second / peak.threads <= highest:
            rate = f"{peak.flops_per_second:.2g} FLOP/s"
            yield f"{_threads(peak.threads)} with {peak.isa} reached {rate}, which is impossible for a CPU"
    for bandwidth in machine.bandwidths:
        rate_of_bytes = max(bandwidth.read, bandwidth.copy)
        if not lowest <= rate_of_bytes / bandwidth.threads <= highest:
            yield (
                f"{_threads(bandwidth.threads)} moved {rate_of_bytes:.2g} bytes per second, "
                "which is impossible for a CPU"
            )


def _implausible_scaling(machine: MachineFigures) -> Iterator[str]:
    """Rates that fall with more threads, or rise faster than the number of threads."""
    for isa in dict.fromkeys(p.isa for p in machine.peaks):
        rates = {p.threads: p.flops_per_second for p in machine.peaks if p.isa == isa}
        yield from _check_scaling(rates, f"multiply-add rate with {isa}", _MIN_SCALING)
    largest = max(b.bytes for b in machine.bandwidths)
    rates = {b.threads: b.read for b in machine.bandwidths if b.bytes == largest}
    yield from _check_scaling(rates, "memory read bandwidth", _MIN_MEMORY_SCALING)


def _check_scaling(rates: dict[int, float], quantity: str, min_scaling: float) -> Iterator[str]:
    """Compare the rates of each two successive thread counts."""
    for fewer, more in itertools.pairwise(sorted(rates)):
        gain = rates[more] / rates[fewer]
        if gain < min_scaling:
            yield f"{_threads(more)} reached only {gain:.2f} times the {quantity} of {_threads(fewer)}"
        elif gain > _MAX_SCALING_PER_THREAD * more / fewer:
            yield f"{_threads(more)} reached {gain:.1f} times the {quantity} of {_threads(fewer)}, which is impossible"


def _slow_caches(machine: MachineFigures) -> Iterator[str]:
    """Single-threaded reads from cache that are slower than reads from memory."""
    rows = sorted((b for b in machine.bandwidths if b.threads == 1), key=lambda b: b.bytes)
    if len(rows) > 1 and rows[0].read < _MIN_SCALING * rows[-1].read:
        yield f"the smallest working set was read at {rows[0].read / rows[-1].read:.2f} times the speed of memory"


def _threads(n: int) -> str:
    return "one thread" if n == 1 else f"{n} threads"
