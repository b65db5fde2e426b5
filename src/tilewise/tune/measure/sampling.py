"""How runtimes are taken, the same on every machine: shuffled batches in rounds, each with the default beside it.

- A unit is a callable that runs one configuration several times, long enough for the clock.
- A batch is a handful of units in shuffled order with the default configuration before and after them. Each timing is
  reported as soon as it is there (on a CPU between two units, on a GPU while the next ones run); the batch
  is judged when it closes.
- Each round goes over all configurations once, so that a drift meets all alike. There are at least `rounds`, more for
  configurations that still scatter.
- The best few are timed again at the end (see `racing`).
- A batch whose two default readings disagree with each other or with the kernel's own median, or during which the
  machine was busy with something else, was disturbed: it is kept, marked, and measured again.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewise.store.aggregate import FIRST_FINAL_ROUND, MIN_FINAL_TIMINGS
from tilewise.store.problem import Config
from tilewise.tune.measure.racing import best_few, stands

Run = Callable[[], Any]


@dataclass(frozen=True)
class Settings:
    """How long and how often; the defaults are a GPU's."""

    unit_ms: float = 0.8
    max_launches: int = 96
    rounds: int = 3
    max_rounds: int = 6
    batch_configs: int = 32
    scatter: float = 0.01
    disturbed: float = 0.03
    max_sets: int = 16
    slowest_ms: float = 25.0
    heat: int = 0  # so many, at least the finalists, are in the first rounds of the finals
    finalists: int = 8  # the best so many are timed again at the end,
    final_rounds: int = 4  # so often at least,
    most_final_rounds: int = 8  # and so often at most,
    final_error: float = 0.002  # until the first is told from the others, or differs by about this
    settle_ms: float = 0.0  # what runs for less than this runs once, uncounted, before it is timed
    kernel_seconds: float = 0.0  # of timing in the first rounds: slow kernels get fewer configurations; 0 is no limit


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
    final: list[float] = field(default_factory=list)  # in the finals


class Clock:
    """What the timing needs of a machine."""

    warm_up_seconds = 0.0

    def time_units(self, units: Sequence[Run]) -> list[float]:
        """Run the units one after the other; nanoseconds of each."""
        return list(self.each_unit(units))

    def each_unit(self, units: Iterable[Run]) -> Iterator[float]:
        """The same, every reading handed over as soon as it is there. A GPU has all units queued by then; a CPU asks
        for the next one only when the reading before it has been dealt with."""
        for unit in units:
            start = time.perf_counter_ns()
            unit()
            yield float(time.perf_counter_ns() - start)

    def watch(self) -> dict[str, float]:
        """Clock, temperature and the like since the last call; `elsewhere` is the share of time spent on others."""
        return {}


# Is told of everything as it comes, outside of what is timed:
#   "begin", number, default_ns       a batch of a round begins with this reading of the default
#   "timing", config, runtime_ns      one configuration of the batch that was begun
#   "batch", batch                    the whole `Batch`, judged
#   "judged", row, moved              a `BatchRow` that an earlier run left open: whether the default has moved since
Report = Callable[..., None]


def time_all(
    clock: Clock,
    settings: Settings,
    candidates: Sequence[Candidate],
    seed: int,
    report: Report,
    go_on: Callable[[], bool] = lambda: True,
) -> bool:
    """Time all candidates, the default first among them; False if `go_on` said to stop before all was done."""
    timing = _Timing(clock, settings, candidates[0], random.Random(seed), report, go_on)
    warm_up(clock, candidates[0])
    others = candidates[1:]
    for number in range(settings.max_rounds):
        order = [candidate for candidate in others if _wants_more(candidate, settings)]
        if not order:
            break
        if not timing.round(number, order):
            return False
    return timing.finals(others)


def time_finals(
    clock: Clock,
    settings: Settings,
    candidates: Sequence[Candidate],
    seed: int,
    report: Report,
    go_on: Callable[[], bool] = lambda: True,
    usual_ns: float | None = None,
) -> bool:
    """The finals alone, of candidates that know their earlier times; False if `go_on` said to stop. Where the default
    is known to take `usual_ns`, batches in which it takes something else are disturbed."""
    timing = _Timing(clock, settings, candidates[0], random.Random(seed), report, go_on)
    if usual_ns is not None:
        timing.defaults = [usual_ns] * (settings.most_final_rounds + 1)
    warm_up(clock, candidates[0])
    return timing.finals(candidates[1:])


@dataclass
class _Timing:
    """What the rounds of one kernel share."""

    clock: Clock
    settings: Settings
    default: Candidate
    chance: random.Random
    report: Report
    go_on: Callable[[], bool]
    defaults: list[float] = field(default_factory=list)

    def round(self, number: int, members: Sequence[Candidate]) -> bool:
        """Everyone once, in a new order; a batch that was disturbed comes again at the end. False: told to stop."""
        order, size = list(members), self.settings.batch_configs
        self.chance.shuffle(order)
        queue = [order[i : i + size] for i in range(0, len(order), size)]
        again = 0
        while queue:
            if not self.go_on():
                return False
            chosen = queue.pop(0)
            batch = self._batch(chosen, number)
            self.report("batch", batch)
            if batch.disturbed and again < 3:
                again += 1
                queue.append(chosen)
                continue
            self.defaults.append(batch.default_ns)
            for candidate, runtime in zip((self.default, *chosen), (batch.default_ns, *batch.runtime_ns), strict=True):
                (candidate.times if number < FIRST_FINAL_ROUND else candidate.final).append(runtime)
        return True

    def finals(self, others: Sequence[Candidate]) -> bool:
        """Time the best few until their order stands. False: told to stop."""
        for number in range(self.settings.most_final_rounds if self.settings.finalists else 0):
            heat = self.settings.heat if number < MIN_FINAL_TIMINGS else 0
            few = best_few(others, self.default, max(heat, self.settings.finalists))
            if not heat and stands(few, self.settings):
                break
            if not self.round(FIRST_FINAL_ROUND + number, few):
                return False
        return True

    def _batch(self, chosen: Sequence[Candidate], number: int) -> Batch:
        """The default, the chosen ones, the default again; and one default before them all that is not counted."""
        times = self._readings(chosen, number)
        watch = self.clock.watch()
        first, last = times[0], times[-1]
        default_ns, limit = (first + last) / 2, self.settings.disturbed
        usual = statistics.median([*self.defaults, default_ns])
        unsteady = abs(first / last - 1) > limit or abs(default_ns / usual - 1) > limit
        disturbed = unsteady or watch.get("elsewhere", 0.0) > limit
        return Batch(number, tuple(c.index for c in chosen), tuple(times[1:-1]), default_ns, disturbed, watch)

    def _readings(self, chosen: Sequence[Candidate], number: int) -> list[float]:
        members = [self.default, *chosen, self.default]
        units = self.clock.each_unit(self._units([self.default, *members]))
        next(units)
        times: list[float] = []
        for place, (member, taken) in enumerate(zip(members, units, strict=True)):
            times.append(taken / member.launches)
            if place == 0:
                self.report("begin", number, times[0])
            elif place <= len(chosen):
                self.report("timing", member.config, times[-1])
        return times

    def _units(self, members: Sequence[Candidate]) -> Iterator[Run]:
        for place, member in enumerate(members):
            if place and member.estimate_ns < self.settings.settle_ms * 1e6:
                member.runs[0]()  # what recording left in the caches is not this configuration's doing
            yield _unit(member)


def _unit(candidate: Candidate) -> Run:
    assert candidate.unit is not None
    return candidate.unit


def _wants_more(candidate: Candidate, settings: Settings) -> bool:
    count = len(candidate.times)
    return count < settings.rounds or (count < settings.max_rounds and scatter(candidate.times) > settings.scatter)


def warm_up(clock: Clock, default: Candidate) -> None:
    """Bring the clock up: an idle machine runs at a fraction of it."""
    assert default.unit is not None
    until = time.perf_counter() + clock.warm_up_seconds
    while time.perf_counter() < until:
        clock.time_units([default.unit])


def scatter(times: Sequence[float]) -> float:
    """Relative standard deviation of the repeats, around their median."""
    return statistics.stdev(times) / statistics.median(times) if len(times) > 1 else math.inf
