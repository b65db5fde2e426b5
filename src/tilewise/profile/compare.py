"""Timer.compare: which function is faster, and is the difference significant?

Functions are run in blocks. In each block they run once in a random order and once in the reverse order (ABBA or BAAB
for two), so a gradual slow-down of the machine affects all of them equally. A block gives one log-ratio per function;
these feed a sign-flip test. A difference is reported only when the test rejects "no difference" *and* it is larger than
`min_effect`: differences below about 2 % usually come from the placement of code and data in memory.
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

_MIN_BLOCKS = 6  # with fewer, no outcome of the sign-flip test can reach p < 0.01


@dataclass(frozen=True)
class Ratio:
    """The time of one function divided by the baseline's: above 1 is slower than the baseline."""

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
    """Measurements of all functions and their ratios to the first one.

    `ratio`, `interval`, `p_value` and `different` are shortcuts for a comparison of exactly two functions.
    """

    baseline: str
    measurements: dict[str, Measurement]
    ratios: dict[str, Ratio]
    blocks: int
    reasons: list[str] = field(default_factory=list)

    def _only(self) -> Ratio:
        """Return the ratio of a comparison of exactly two functions; raise otherwise."""
        if len(self.ratios) != 1:
            raise ConfigurationError("this comparison has several ratios; select one with .ratios[name]")
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
    max_runs: int | None = None,
    min_runs: int = 2 * _MIN_BLOCKS,
    time_limit: float | None = None,
) -> Comparison:
    """Compare functions with the first of them.

    Each function is sampled `runs` times. While the interval of a ratio is wider than `min_effect` on either side,
    sampling continues up to `max_runs` samples (default: four times `runs`). With several ratios the p-values are
    corrected with Holm's method. If the time limit ends sampling before `min_runs` samples, a TimeLimitError is raised;
    with fewer samples than the default of `min_runs` no difference can become significant.
    """
    from tilewise.profile.timer import check_count, check_limit

    check_count("min_runs", min_runs, 2)
    check_count("runs", runs, min(min_runs, 2 * _MIN_BLOCKS))
    if len(functions) < 2:
        raise ConfigurationError("compare needs at least two functions, given as a dictionary from names to functions")
    limit = check_limit(timer.time_limit if time_limit is None else time_limit)
    samples = _InterleavedSamples(functions, timer.sample_seconds / 5, timer.seed)
    reasons = _sample(
        samples,
        target_blocks=runs // 2,
        max_blocks=(max_runs or 4 * runs) // 2,
        min_blocks=min_runs // 2,
        min_effect=min_effect,
        limit=limit,
    )
    return _conclude(timer, samples, min_effect, alpha, reasons)


class _InterleavedSamples:
    """Timing samples taken in interleaved blocks: two samples of every function per block."""

    def __init__(self, functions: Mapping[str, Function], sample_seconds: float, seed: int) -> None:
        """Start without samples; each sample will take about `sample_seconds`."""
        self.functions = dict(functions)
        self.names = list(functions)
        self.samples: dict[str, list[float]] = {name: [] for name in functions}
        self.calls: dict[str, int] = {}
        self._sample_seconds = sample_seconds
        self._random = np.random.default_rng(seed)

    def start(self) -> None:
        """Calibrate the number of calls per sample for each function, then take one warm-up sample each."""
        for name, func in self.functions.items():
            self.calls[name] = clock.calibrate(func, self._sample_seconds)
        for name in self.names:
            clock.timed_calls(self.functions[name], self.calls[name])

    def run_block(self) -> None:
        """Sample every function twice: in a random order, then in the reverse order."""
        order = [self.names[i] for i in self._random.permutation(len(self.names))]
        block = [(name, clock.seconds_per_call(self.functions[name], self.calls[name])) for name in order + order[::-1]]
        # Append only after the whole block has run, so that a time limit never leaves half a block behind.
        for name, value in block:
            self.samples[name].append(value)

    @property
    def blocks(self) -> int:
        return len(self.samples[self.names[0]]) // 2

    def log_ratios(self, name: str) -> Floats:
        """Return log(time / baseline's time) of the function `name` for each block."""
        return self._block_logs(name) - self._block_logs(self.names[0])

    def _block_logs(self, name: str) -> Floats:
        """Return the log time of the function `name` in each block, the faster of its two samples."""
        values = np.maximum(np.asarray(self.samples[name][: 2 * self.blocks]), 1e-12)
        # Take the faster of the block's two samples: a disturbance only ever adds time, and rarely hits both.
        logs: Floats = np.log(values.reshape(-1, 2).min(axis=1))
        return logs


def _sample(
    samples: _InterleavedSamples,
    *,
    target_blocks: int,
    max_blocks: int,
    min_blocks: int,
    min_effect: float,
    limit: float,
) -> list[str]:
    """Sample in blocks until the intervals are narrow enough or time is up; return reasons to distrust the result.

    `min_effect` is the half-width that is narrow enough, `limit` the time in seconds.
    """
    start_time = time.perf_counter()
    before = read_machine()
    try:
        with time_limit(limit):
            samples.start()
            before = read_machine()
            while samples.blocks < target_blocks:
                samples.run_block()
                reached = samples.blocks == target_blocks
                if reached and target_blocks < max_blocks and _too_wide(samples, min_effect):
                    target_blocks = min(2 * target_blocks, max_blocks)
    except TimeIsUp:
        if samples.blocks < min_blocks:
            elapsed = time.perf_counter() - start_time
            raise TimeLimitError(
                f"only {samples.blocks} rounds of the comparison finished within {elapsed:.3g} s; "
                "give a larger time_limit or a shorter function"
            ) from None
    except Exception as error:
        raise MeasurementError(f"a function raised {type(error).__name__}: {error}; the comparison stopped") from error
    return machine_reasons(before, read_machine())


def _too_wide(samples: _InterleavedSamples, min_effect: float) -> bool:
    """Tell whether the interval of any ratio is too wide to detect a difference of `min_effect`."""
    tests = (signed_rank_test(samples.log_ratios(name), permutations=1) for name in samples.names[1:])
    return any(test.interval.half_width > min_effect / 2 for test in tests)


def _conclude(
    timer: Timer, samples: _InterleavedSamples, min_effect: float, alpha: float, reasons: list[str]
) -> Comparison:
    """Test, at level `alpha`, whether each function differs from the baseline by `min_effect`; return all results."""
    from tilewise.profile.timer import Series

    baseline = samples.names[0]
    tests = {
        name: signed_rank_test(samples.log_ratios(name), timer.confidence, seed=timer.seed)
        for name in samples.names[1:]
    }
    p_values = _holm({name: test.p_value for name, test in tests.items()})
    ratios = {}
    for name, test in tests.items():
        ratio = float(np.exp(test.centre))
        interval = Interval(float(np.exp(test.interval.low)), float(np.exp(test.interval.high)), timer.confidence)
        different = p_values[name] < alpha and abs(test.centre) > np.log1p(min_effect)
        ratios[name] = Ratio(
            name=name,
            baseline=baseline,
            ratio=ratio,
            interval=interval,
            p_value=p_values[name],
            different=bool(different),
            min_effect=min_effect,
        )
    measurements = {
        name: timer.summarise(Series(samples.samples[name], samples.calls[name], list(reasons)))
        for name in samples.names
    }
    return Comparison(baseline, measurements, ratios, samples.blocks, reasons)


def _holm(p_values: dict[str, float]) -> dict[str, float]:
    """Correct p-values, by name, for multiple tests by Holm's step-down method (Holm 1979)."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    for position, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, p * (len(p_values) - position)))
        adjusted[name] = largest
    return adjusted
