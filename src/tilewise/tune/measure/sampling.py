"""The timing protocol of all machines: shuffled batches in rounds, each batch with readings of the default.

- A unit is a callable that runs one configuration several times, long enough for the clock.
- A batch is a few units in random order, with the default configuration before and after them. Each timing is reported
  immediately (on a CPU between two units, on a GPU while the next ones run); the batch is accepted or not at its end.
- Each round times every configuration once, so that drift affects all of them equally. There are at least `rounds`
  rounds, and more for configurations whose readings still scatter.
- The finals: the fastest few are timed again, all of them in every batch, until their order is settled. The minimum of
  a hundred noisy readings is mostly the luckiest one (the winner's curse), so final runtimes come from these timings
  alone. A finalist that falls behind is replaced by the next one. If readings are so noisy that the fastest may not be
  among the finalists, more configurations take part in the first rounds.
- A batch is disturbed if its two default readings disagree with each other or with the kernel's median, or if other
  programs used the CPU meanwhile. Disturbed batches are stored, marked, and measured again.

A kernel whose measurement was stopped is resumed with its earlier timings, relative to the default of their own batch
and scaled to the machine's current speed. A batch that was cut off has no second reading of its default; the default is
timed now, and the batch counts if this agrees with the first reading.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewise.store.aggregate import FIRST_FINAL_ROUND, MIN_FINAL_TIMINGS, faster_two_of_three
from tilewise.store.problem import Config
from tilewise.store.reader import BatchRow

Run = Callable[[], Any]

_MIN_STANDARD_ERRORS = 3.0  # distance at which two configurations count as different

_DEFAULT_READINGS = 5  # of the default at the start; their median counts


@dataclass(frozen=True)
class TimingSettings:
    """Durations and repetitions of the timing protocol; the defaults are those of a GPU."""

    unit_ms: float = 0.8
    max_launches: int = 96
    rounds: int = 3
    max_rounds: int = 6
    batch_configs: int = 32
    scatter: float = 0.01
    disturbed: float = 0.03
    max_sets: int = 16
    slowest_ms: float = 25.0
    heat: int = 0  # configurations in the first rounds of the finals, if more than the finalists
    finalists: int = 8  # fastest configurations that are timed again at the end
    final_rounds: int = 4  # minimum rounds of the finals
    most_final_rounds: int = 8  # maximum rounds of the finals
    final_error: float = 0.002  # standard error of the log ratios at which the finals may end
    settle_ms: float = 0.0  # shorter runs are preceded by an untimed run that warms the caches
    kernel_seconds: float = 0.0  # budget of the first rounds; limits the configurations of slow kernels (0: no limit)


@dataclass(frozen=True)
class TimedBatch:
    """Timings of one batch in nanoseconds per run; `configs` are indices of the job's configurations.

    `default_ns` is the mean of the two readings of the default.
    """

    round: int
    configs: tuple[int, ...]
    runtime_ns: tuple[float, ...]
    default_ns: float
    disturbed: bool
    watch: dict[str, float]


@dataclass
class Candidate:
    """A configuration with a correct result, and its timings so far."""

    index: int
    config: Config
    runs: list[Run]  # one for each operand set
    estimate_ns: float = 0.0
    launches: int = 1
    unit: Run = field(default=lambda: None)  # set before anything is timed
    times: list[float] = field(default_factory=list)
    final: list[float] = field(default_factory=list)  # timings of the finals


class Clock:
    """Interface of a machine to the timing protocol."""

    warm_up_seconds = 0.0

    def time_units(self, units: Sequence[Run]) -> list[float]:
        """Run the units one after the other; return the nanoseconds of each."""
        return list(self.each_unit(units))

    def each_unit(self, units: Iterable[Run]) -> Iterator[float]:
        """Run the units one after the other and yield the nanoseconds of each as soon as they are known.

        A GPU has queued all units by then; a CPU starts the next one only after the previous time was processed.
        """
        for unit in units:
            start = time.perf_counter_ns()
            unit()
            yield float(time.perf_counter_ns() - start)

    def watch(self) -> dict[str, float]:
        """Return the machine's state since the last call; `elsewhere` is the share of time of other programs."""
        return {}


# Callback for events, called outside of timed sections:
#   "begin", number, default_ns       a batch of a round begins with this reading of the default
#   "timing", config, runtime_ns      one configuration of the batch that was begun
#   "batch", batch                    the complete `TimedBatch`
#   "judged", row, disturbed          a `BatchRow` that an earlier run left open, and whether it counts as disturbed
Report = Callable[..., None]


def time_all(
    clock: Clock,
    settings: TimingSettings,
    candidates: Sequence[Candidate],
    seed: int,
    report: Report,
    go_on: Callable[[], bool] = lambda: True,
    *,
    finals_only: bool = False,
    usual_ns: float | None = None,
) -> bool:
    """Time all candidates in shuffled, interleaved rounds; the first one is the default. False if `go_on` stopped it.

    With `finals_only` the candidates have earlier timings and only the finals are run. If `usual_ns` is given, batches
    whose default deviates from it count as disturbed.
    """
    usual = [] if usual_ns is None else [usual_ns] * (settings.most_final_rounds + 1)
    timing = _Timing(clock, settings, candidates[0], random.Random(seed), report=report, go_on=go_on, defaults=usual)
    warm_up(clock, candidates[0])
    others = candidates[1:]
    for number in range(0 if finals_only else settings.max_rounds):
        order = [candidate for candidate in others if _wants_more(candidate, settings)]
        if not order:
            break
        if not timing.round(number, order):
            return False
    return timing.finals(others)


@dataclass
class _Timing:
    """The timing of one kernel's candidates; the state that its rounds share."""

    clock: Clock
    settings: TimingSettings
    default: Candidate
    rng: random.Random
    report: Report
    go_on: Callable[[], bool]
    defaults: list[float] = field(default_factory=list)

    def round(self, number: int, members: Sequence[Candidate]) -> bool:
        """Time every candidate once, in random order; repeat disturbed batches at the end. False if stopped."""
        order, size = list(members), self.settings.batch_configs
        self.rng.shuffle(order)
        queue = [order[i : i + size] for i in range(0, len(order), size)]
        repeats = 0
        while queue:
            if not self.go_on():
                return False
            batch_members = queue.pop(0)
            batch = self._batch(batch_members, number)
            self.report("batch", batch)
            if batch.disturbed and repeats < 3:
                repeats += 1
                queue.append(batch_members)
                continue
            self.defaults.append(batch.default_ns)
            runtimes = (batch.default_ns, *batch.runtime_ns)
            for candidate, runtime in zip((self.default, *batch_members), runtimes, strict=True):
                (candidate.times if number < FIRST_FINAL_ROUND else candidate.final).append(runtime)
        return True

    def finals(self, others: Sequence[Candidate]) -> bool:
        """Time the fastest few candidates until their order is clear. False if stopped."""
        for number in range(self.settings.most_final_rounds if self.settings.finalists else 0):
            heat = self.settings.heat if number < MIN_FINAL_TIMINGS else 0
            finalists = leaders(others, self.default, max(heat, self.settings.finalists))
            if not heat and is_settled(finalists, self.settings):
                break
            if not self.round(FIRST_FINAL_ROUND + number, finalists):
                return False
        return True

    def _batch(self, batch_members: Sequence[Candidate], number: int) -> TimedBatch:
        """Time a batch: the default, the candidates, the default again, after an uncounted run of the default."""
        times = self._readings(batch_members, number)
        watch = self.clock.watch()
        first, last = times[0], times[-1]
        default_ns, limit = (first + last) / 2, self.settings.disturbed
        usual = statistics.median([*self.defaults, default_ns])
        unsteady = abs(first / last - 1) > limit or abs(default_ns / usual - 1) > limit
        disturbed = unsteady or watch.get("elsewhere", 0.0) > limit
        return TimedBatch(
            round=number,
            configs=tuple(candidate.index for candidate in batch_members),
            runtime_ns=tuple(times[1:-1]),
            default_ns=default_ns,
            disturbed=disturbed,
            watch=watch,
        )

    def _readings(self, batch_members: Sequence[Candidate], number: int) -> list[float]:
        """Return nanoseconds per run of a batch's units, the default first and last; report each at once."""
        members = [self.default, *batch_members, self.default]
        units = self.clock.each_unit(self._units([self.default, *members]))
        next(units)
        times: list[float] = []
        for position, (member, elapsed_ns) in enumerate(zip(members, units, strict=True)):
            times.append(elapsed_ns / member.launches)
            if position == 0:
                self.report("begin", number, times[0])
            elif position <= len(batch_members):
                self.report("timing", member.config, times[-1])
        return times

    def _units(self, members: Sequence[Candidate]) -> Iterator[Run]:
        """Yield a batch's timed units; a short one is preceded by an untimed run."""
        for position, member in enumerate(members):
            if position and member.estimate_ns < self.settings.settle_ms * 1e6:
                member.runs[0]()  # writing the last reading to the store has changed the caches
            yield member.unit


def _wants_more(candidate: Candidate, settings: TimingSettings) -> bool:
    """Tell whether a candidate needs more timings: it has too few, or they scatter too much."""
    count = len(candidate.times)
    return count < settings.rounds or (count < settings.max_rounds and scatter(candidate.times) > settings.scatter)


def warm_up(clock: Clock, default: Candidate) -> None:
    """Run the default until the clock frequency has risen from that of an idle machine."""
    until = time.perf_counter() + clock.warm_up_seconds
    while time.perf_counter() < until:
        clock.time_units([default.unit])


def scatter(times: Sequence[float]) -> float:
    """Return the relative standard deviation of repeated times around their median."""
    return statistics.stdev(times) / statistics.median(times) if len(times) > 1 else math.inf


def relative_runtime(candidate: Candidate, default: Candidate) -> float:
    """Return a candidate's time divided by the default's, from final timings if there are enough of them."""
    if len(candidate.final) >= MIN_FINAL_TIMINGS:
        return faster_two_of_three(candidate.final) / faster_two_of_three(default.final)
    return faster_two_of_three(candidate.times) / faster_two_of_three(default.times)


def leaders(candidates: Sequence[Candidate], default: Candidate, count: int) -> list[Candidate]:
    """Return the `count` fastest candidates so far, fastest first."""
    candidates_with_times = [c for c in candidates if (c.times and default.times) or len(c.final) >= MIN_FINAL_TIMINGS]
    return sorted(candidates_with_times, key=lambda candidate: relative_runtime(candidate, default))[:count]


def is_settled(finalists: Sequence[Candidate], settings: TimingSettings) -> bool:
    """Tell whether the finals can end: the first finalist is clearly faster, or the difference is precisely known."""
    if any(len(candidate.final) < settings.final_rounds for candidate in finalists):
        return False
    return all(_is_separated(finalists[0].final, rival.final, settings.final_error) for rival in finalists[1:])


def _is_separated(best: Sequence[float], rival: Sequence[float], error: float) -> bool:
    """Tell whether `rival` is clearly slower than `best`, or their log ratio is known to within `error`."""
    common = min(len(best), len(rival))
    log_ratios = [math.log(b / a) for a, b in zip(best[-common:], rival[-common:], strict=True)]
    deviation = statistics.stdev(log_ratios) / math.sqrt(common) if common > 1 else math.inf
    return deviation <= error or statistics.fmean(log_ratios) >= _MIN_STANDARD_ERRORS * deviation


def earlier_default(batches: Sequence[BatchRow]) -> float | None:
    """Return the default's median time in undisturbed rounds of the last run that has any; None without."""
    undisturbed = [batch for batch in batches if not batch.disturbed and batch.round < FIRST_FINAL_ROUND]
    return statistics.median(b.default_ns for b in undisturbed if b.run == undisturbed[-1].run) if undisturbed else None


def resume(
    clock: Clock, settings: TimingSettings, candidates: Sequence[Candidate], batches: Sequence[BatchRow], report: Report
) -> None:
    """Add an interrupted run's timings (`batches`) to the candidates; report which of its open batches are valid."""
    if not batches:
        return
    default = candidates[0]
    warm_up(clock, default)
    now_ns = statistics.median(clock.time_units([default.unit] * _DEFAULT_READINGS)) / default.launches
    clock.watch()  # reset: the first batch must not be blamed for what happened before it
    times: dict[str, list[float]] = defaultdict(list)
    final: dict[str, list[float]] = defaultdict(list)
    for batch in batches:
        disturbed = batch.disturbed
        if batch.open:
            disturbed = abs(now_ns / batch.default_ns - 1) > settings.disturbed
            report("judged", batch, disturbed)
        if not disturbed:
            destination = final if batch.round >= FIRST_FINAL_ROUND else times
            for key, runtime_ns in ((default.config.key, batch.default_ns), *batch.runtime_ns.items()):
                destination[key].append(runtime_ns / batch.default_ns * now_ns)
    for candidate in candidates:
        candidate.times, candidate.final = times[candidate.config.key], final[candidate.config.key]
