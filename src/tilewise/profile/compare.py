"""Timer.compare: which function is faster, and may one say so?

Functions are run in blocks. In each block they run once in a random order and once in the reverse order (ABBA or BAAB
for two), so a machine that slows down slowly touches all of them alike. A block gives one log-ratio per function; these
feed a sign-flip test. A difference is called only when the test rejects "no difference" *and* it is larger than
`min_effect`: below about 2 % the placement of code and data in memory decides, not the function.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tilewise.errors import ConfigurationError
from tilewise.profile.timing import clock
from tilewise.profile.timing.limits import MeasurementError, TimeIsUp, TimeLimitError, time_limit
from tilewise.profile.timing.stability import machine_reasons, read_machine
from tilewise.profile.timing.statistics import Floats, Interval, signed_rank_test

if TYPE_CHECKING:
    from tilewise.profile.timer import Function, Measurement, Timer

_FEWEST_BLOCKS = 6  # with fewer, no outcome of the sign-flip test can reach p < 0.01


@dataclass(frozen=True)
class Ratio:
    """One function against the baseline: time over time, so above 1 is slower than the baseline."""

    name: str
    baseline: str
    ratio: float
    interval: Interval
    p_value: float
    different: bool
    min_effect: float

    def __str__(self) -> str:
        span = f"{self.ratio:.3f}× the time, 95 % interval {self.interval.low:.3f} to {self.interval.high:.3f}"
        if self.different:
            word = "slower" if self.ratio > 1 else "faster"
            return f"{self.name} is {word} than {self.baseline}: {span}, p = {self.p_value:.2g}"
        verdict = f"no difference between {self.name} and {self.baseline}: {span}, p = {self.p_value:.2g}"
        if self.interval.half_width > self.min_effect:
            verdict += " (too noisy to see a small one)"
        return verdict


@dataclass(frozen=True)
class Comparison:
    """Every function's own measurement and its ratio to the first; of two functions, the ratio's fields as well."""

    baseline: str
    measurements: dict[str, Measurement]
    ratios: dict[str, Ratio]
    blocks: int
    reasons: list[str] = field(default_factory=list)

    def _only(self) -> Ratio:
        if len(self.ratios) != 1:
            raise ConfigurationError("this comparison has several ratios; ask .ratios[name] for the one you mean")
        return next(iter(self.ratios.values()))

    @property
    def ratio(self) -> float:
        return self._only().ratio

    @property
    def interval(self) -> Interval:
        return self._only().interval

    @property
    def p_value(self) -> float:
        return self._only().p_value

    @property
    def different(self) -> bool:
        return self._only().different

    @property
    def verdict(self) -> str:
        return "\n".join(str(ratio) for ratio in self.ratios.values())

    def __str__(self) -> str:
        return "\n".join([self.verdict, *(f"  unstable, {reason}" for reason in self.reasons)])


def compare(
    timer: Timer,
    functions: Mapping[str, Function],
    runs: int = 100,
    *,
    min_effect: float = 0.02,
    alpha: float = 0.01,
    most_runs: int | None = None,
    fewest_runs: int = 2 * _FEWEST_BLOCKS,
    time_limit: float | None = None,
) -> Comparison:
    """Compare functions against the first of them.

    Each is sampled `runs` times; while the interval of a ratio is wider than `min_effect` on either side, sampling goes
    on up to `most_runs` (four times `runs` unless given). With several ratios the p-values are Holm's. Where the time
    limit leaves fewer than `fewest_runs` of each it is an error; below the default nothing can be called different.
    """
    from tilewise.profile.timer import check_count, check_limit

    check_count("fewest_runs", fewest_runs, 2)
    check_count("runs", runs, min(fewest_runs, 2 * _FEWEST_BLOCKS))
    if len(functions) < 2:
        raise ConfigurationError("compare needs at least two functions, as a dictionary of names")
    limit = check_limit(timer.time_limit if time_limit is None else time_limit)
    rounds = _Rounds(functions, timer.sample_seconds / 5, timer.seed)
    reasons = _sample(rounds, runs // 2, (most_runs or 4 * runs) // 2, fewest_runs // 2, min_effect, limit)
    return _conclude(timer, rounds, min_effect, alpha, reasons)


class _Rounds:
    """The interleaved samples: one list per function, two entries a block."""

    def __init__(self, functions: Mapping[str, Function], sample_seconds: float, seed: int) -> None:
        self.functions = dict(functions)
        self.names = list(functions)
        self.samples: dict[str, list[float]] = {name: [] for name in functions}
        self.calls: dict[str, int] = {}
        self._sample_seconds = sample_seconds
        self._random = np.random.default_rng(seed)

    def start(self) -> None:
        for name, func in self.functions.items():
            self.calls[name] = clock.calibrate(func, self._sample_seconds)
        for name in self.names:
            clock.timed_calls(self.functions[name], self.calls[name])

    def run_block(self) -> None:
        order = [self.names[i] for i in self._random.permutation(len(self.names))]
        taken = [(name, clock.seconds_per_call(self.functions[name], self.calls[name])) for name in order + order[::-1]]
        for name, value in taken:  # only whole blocks are kept when the time limit strikes
            self.samples[name].append(value)

    @property
    def blocks(self) -> int:
        return len(self.samples[self.names[0]]) // 2

    def log_ratios(self, name: str) -> Floats:
        return self._block_logs(name) - self._block_logs(self.names[0])

    def _block_logs(self, name: str) -> Floats:
        values = np.maximum(np.asarray(self.samples[name][: 2 * self.blocks]), 1e-12)
        # The quicker of the two: a disturbance only ever adds time, and rarely strikes both.
        logs: Floats = np.log(values.reshape(-1, 2).min(axis=1))
        return logs


def _sample(rounds: _Rounds, wanted: int, most: int, fewest: int, min_effect: float, limit: float) -> list[str]:
    started = time.perf_counter()
    before = read_machine()
    try:
        with time_limit(limit):
            rounds.start()
            before = read_machine()
            target = wanted
            while rounds.blocks < target:
                rounds.run_block()
                if rounds.blocks == target and target < most and _too_wide(rounds, min_effect):
                    target = min(2 * target, most)
    except TimeIsUp:
        if rounds.blocks < fewest:
            spent = time.perf_counter() - started
            raise TimeLimitError(
                f"the functions were compared in only {rounds.blocks} rounds when {spent:.3g} s were over; "
                "give a larger time_limit or a shorter function"
            ) from None
    except Exception as error:
        raise MeasurementError(
            f"a function raised {type(error).__name__}: {error}, so there is no comparison"
        ) from error
    return machine_reasons(before, read_machine())


def _too_wide(rounds: _Rounds, min_effect: float) -> bool:
    tests = (signed_rank_test(rounds.log_ratios(name), permutations=1) for name in rounds.names[1:])
    return any(test.interval.half_width > min_effect / 2 for test in tests)


def _conclude(timer: Timer, rounds: _Rounds, min_effect: float, alpha: float, reasons: list[str]) -> Comparison:
    from tilewise.profile.timer import Series

    baseline = rounds.names[0]
    tests = {
        name: signed_rank_test(rounds.log_ratios(name), timer.confidence, seed=timer.seed) for name in rounds.names[1:]
    }
    p_values = _holm({name: test.p_value for name, test in tests.items()})
    ratios = {}
    for name, test in tests.items():
        ratio = float(np.exp(test.centre))
        interval = Interval(float(np.exp(test.interval.low)), float(np.exp(test.interval.high)), timer.confidence)
        different = p_values[name] < alpha and abs(test.centre) > np.log1p(min_effect)
        ratios[name] = Ratio(name, baseline, ratio, interval, p_values[name], bool(different), min_effect)
    measurements = {
        name: timer.summarise(Series(rounds.samples[name], rounds.calls[name], list(reasons))) for name in rounds.names
    }
    return Comparison(baseline, measurements, ratios, rounds.blocks, reasons)


def _holm(p_values: dict[str, float]) -> dict[str, float]:
    """Holm's correction for several tests at once."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    for position, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, p * (len(p_values) - position)))
        adjusted[name] = largest
    return adjusted
