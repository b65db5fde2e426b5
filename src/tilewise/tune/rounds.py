"""How runtimes are taken, the same on every machine: shuffled batches in rounds, each with the default beside it.

- A unit is a callable that runs one configuration several times, long enough for the clock.
- A batch is a handful of units in shuffled order with the default configuration before and after them; it is recorded
  whole, since its default belongs to it.
- Each round goes over all configurations once; there are at least `rounds`, and more for those that still scatter.
- A batch whose two default readings disagree with each other or with the kernel's own median, or during which the
  machine was busy with something else, was disturbed: it is kept, marked, and measured again.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tilewise.tune.problem import Config

Run = Callable[[], Any]


@dataclass(frozen=True)
class Settings:
    """How long and how often; the defaults are what the embedded GPU collection was measured with."""

    unit_ms: float = 0.8
    max_launches: int = 96
    rounds: int = 3
    max_rounds: int = 6
    batch_configs: int = 32
    scatter: float = 0.01
    disturbed: float = 0.03
    max_sets: int = 16
    slowest_ms: float = 25.0


@dataclass(frozen=True)
class Verdict:
    """What became of a configuration: ok, misfit, wrong, failed or slow; and why."""

    config: Config
    status: str
    reason: str = ""
    registers: int = 0
    spills: int = 0


@dataclass(frozen=True)
class Batch:
    """Timings of one batch, nanoseconds per run; configurations by their place in the job. The default's time is the
    mean of its two readings."""

    round: int
    configs: tuple[int, ...]
    runtime_ns: tuple[float, ...]
    default_ns: float
    disturbed: bool
    watch: dict[str, float]


@dataclass
class Candidate:
    """A configuration that gave the right result, and what it took so far."""

    index: int
    config: Config
    runs: list[Run]  # one for each operand set
    estimate_ns: float = 0.0
    launches: int = 1
    unit: Run | None = None
    times: list[float] = field(default_factory=list)


class Clock(Protocol):
    """What the timing needs of a machine."""

    warm_up_seconds: float

    def time_units(self, units: Sequence[Run]) -> list[float]:
        """Run the units one after the other; nanoseconds of each."""

    def watch(self) -> dict[str, float]:
        """Clock, temperature and the like since the last call; `elsewhere` is the share of time spent on others."""


def time_all(
    clock: Clock,
    settings: Settings,
    candidates: Sequence[Candidate],
    seed: int,
    report: Callable[[Batch], None],
    go_on: Callable[[], bool] = lambda: True,
) -> bool:
    """Time all candidates, the default first among them; False if `go_on` said to stop before all was done."""
    chance = random.Random(seed)
    default = candidates[0]
    warm_up(clock, default)
    defaults: list[float] = []
    for number in range(settings.max_rounds):
        order = [candidate for candidate in candidates[1:] if _wants_more(candidate, settings)]
        if not order:
            return True
        chance.shuffle(order)
        queue = [order[i : i + settings.batch_configs] for i in range(0, len(order), settings.batch_configs)]
        again = 0
        while queue:
            if not go_on():
                return False
            chosen = queue.pop(0)
            batch = _time_batch(clock, settings, default, chosen, number, defaults)
            report(batch)
            if batch.disturbed and again < 3:
                again += 1
                queue.append(chosen)
                continue
            defaults.append(batch.default_ns)
            for candidate, runtime in zip(chosen, batch.runtime_ns, strict=True):
                candidate.times.append(runtime)
    return True


def _wants_more(candidate: Candidate, settings: Settings) -> bool:
    if len(candidate.times) < settings.rounds:
        return True
    return len(candidate.times) < settings.max_rounds and scatter(candidate.times) > settings.scatter


def warm_up(clock: Clock, default: Candidate) -> None:
    """Bring the clock up: an idle machine runs at a fraction of it."""
    assert default.unit is not None
    until = time.perf_counter() + clock.warm_up_seconds
    while time.perf_counter() < until:
        clock.time_units([default.unit])


def _time_batch(
    clock: Clock,
    settings: Settings,
    default: Candidate,
    chosen: Sequence[Candidate],
    number: int,
    earlier: Sequence[float],
) -> Batch:
    """The default, the chosen ones, the default again; and one default before them all that is not counted."""
    assert default.unit is not None
    units = [default.unit, default.unit, *(c.unit for c in chosen if c.unit is not None), default.unit]
    times = clock.time_units(units)[1:]
    watch = clock.watch()
    first, last = times[0] / default.launches, times[-1] / default.launches
    default_ns = (first + last) / 2
    usual = statistics.median([*earlier, default_ns])
    unsteady = abs(first / last - 1) > settings.disturbed or abs(default_ns / usual - 1) > settings.disturbed
    disturbed = unsteady or watch.get("elsewhere", 0.0) > settings.disturbed
    runtimes = tuple(t / c.launches for t, c in zip(times[1:-1], chosen, strict=True))
    return Batch(number, tuple(c.index for c in chosen), runtimes, default_ns, disturbed, watch)


def scatter(times: Sequence[float]) -> float:
    """Relative standard deviation of the repeats, around their median."""
    return statistics.stdev(times) / statistics.median(times) if len(times) > 1 else math.inf
