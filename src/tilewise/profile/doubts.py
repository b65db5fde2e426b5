"""Are measured ceilings to be believed? Each check gives a sentence with what it saw, or nothing.

A ceiling that is too low makes every program look better than it is, and stays wrong for as long as it is kept. Figures
that contradict each other, or that were measured while others worked, are shown with a warning and not kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tilewise.profile.timing.stability import MachineReading, machine_reasons

if TYPE_CHECKING:
    from tilewise.profile.machine import Machine

# More threads may share one core's units, or the way to memory, and then reach no more; less than this is disturbance.
_LEAST_GAIN, _LEAST_GAIN_OF_MEMORY = 0.9, 0.75
# Twice the threads reach at most twice as much, but for a clock that changed.
_MOST_PER_THREAD = 1.3
# No core of any CPU reaches a quarter of this, nor does the slowest fall below.
_PER_CORE = (1e8, 2e12)


def doubts(figures: Machine, before: MachineReading, after: MachineReading) -> list[str]:
    """What speaks against keeping these figures, the weightiest first; empty where nothing does."""
    return [*contradictions(figures), *machine_reasons(before, after)]


def contradictions(figures: Machine) -> list[str]:
    """What the figures themselves speak against; empty where nothing does."""
    return [*_impossible(figures), *_thread_doubts(figures), *_order_doubts(figures)]


def _impossible(figures: Machine) -> Iterator[str]:
    least, most = _PER_CORE
    for peak in figures.peaks:
        if not least <= peak.flops_per_second / peak.threads <= most:
            rate = f"{peak.flops_per_second:.2g} FLOP/s"
            yield f"{_threads(peak.threads)} of {peak.isa} came to {rate}, which no CPU does"
    for b in figures.bandwidths:
        if not least <= max(b.read, b.copy) / b.threads <= most:
            yield f"{_threads(b.threads)} moved {max(b.read, b.copy):.2g} bytes a second, which no CPU does"


def _thread_doubts(figures: Machine) -> Iterator[str]:
    """More threads that reach less than fewer do, or more than they can."""
    for isa in dict.fromkeys(p.isa for p in figures.peaks):
        rates = {p.threads: p.flops_per_second for p in figures.peaks if p.isa == isa}
        yield from _compare(rates, f"multiply-adds with {isa}", _LEAST_GAIN)
    largest = max(b.bytes for b in figures.bandwidths)
    rates = {b.threads: b.read for b in figures.bandwidths if b.bytes == largest}
    yield from _compare(rates, "bytes read from memory", _LEAST_GAIN_OF_MEMORY)


def _compare(rates: dict[int, float], what: str, least: float) -> Iterator[str]:
    counts = sorted(rates)
    for few, many in itertools.pairwise(counts):
        gain = rates[many] / rates[few]
        if gain < least:
            yield f"{_threads(many)} reached {gain:.2f} of the {what} of {_threads(few)}, and should reach no less"
        elif gain > _MOST_PER_THREAD * many / few:
            yield f"{_threads(many)} reached {gain:.1f} times the {what} of {_threads(few)}, and cannot"


def _order_doubts(figures: Machine) -> Iterator[str]:
    """A cache that is slower than memory, for one thread."""
    alone = sorted((b for b in figures.bandwidths if b.threads == 1), key=lambda b: b.bytes)
    if len(alone) > 1 and alone[0].read < _LEAST_GAIN * alone[-1].read:
        yield f"the smallest working set was read at {alone[0].read / alone[-1].read:.2f} of the speed of memory"


def _threads(n: int) -> str:
    return "one thread" if n == 1 else f"{n} threads"
