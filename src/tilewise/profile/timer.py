"""Timer: how long a function takes, with a confidence interval and checks of whether the result is reliable.

Short functions are called many times per sample, the cost of the loop is subtracted, and the load of the machine is
observed during the measurement. `compare` (see compare.py) interleaves several functions; on a shared machine this is
the only reliable way to find out which one is faster.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise.backend.instance_methods import ExplainsMethods
from tilewise.errors import ConfigurationError, type_name
from tilewise.profile.timing import clock
from tilewise.profile.timing.limits import MeasurementError, TimeIsUp, TimeLimitError, time_limit
from tilewise.profile.timing.stability import machine_reasons, read_machine, sample_reasons
from tilewise.profile.timing.statistics import Floats, Interval, bootstrap_intervals, median
from tilewise.profile.units import seconds

if TYPE_CHECKING:
    from tilewise.profile.compare import Comparison

Function = Callable[[], Any]


@dataclass(frozen=True)
class Measurement:
    """Seconds per call: all samples, their percentiles, and reasons to distrust them.

    A sample is the mean over `calls_per_sample` calls, so p95 and p99 describe samples, not single calls, unless that
    number is 1. `intervals` contains a confidence interval for each of p50, p95, p99 and mean.
    """

    samples: Floats
    p50: float
    p95: float
    p99: float
    mean: float
    std: float
    intervals: dict[str, Interval]
    calls_per_sample: int
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    processes: int = 0

    @property
    def stable(self) -> bool:
        """Whether no reliability check found a problem; `reasons` lists the problems."""
        return not self.reasons

    @property
    def minimum(self) -> float:
        return float(self.samples.min())

    def __str__(self) -> str:
        """Format the median with its interval and other percentiles, then reasons for doubt and notes."""
        low, high = (seconds(bound) for bound in (self.intervals["p50"].low, self.intervals["p50"].high))
        interval = f" (95 % interval {low} to {high})" if low != high else ""
        lines = [
            f"p50 {seconds(self.p50)}{interval}, p95 {seconds(self.p95)}, "
            f"p99 {seconds(self.p99)}, {len(self.samples)} samples of "
            f"{self.calls_per_sample} call{'s'[: self.calls_per_sample > 1]}"
        ]
        lines += [f"  unstable, {reason}" for reason in self.reasons] + [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON."""
        names = ("p50", "p95", "p99", "mean", "std", "calls_per_sample", "reasons", "notes", "processes", "stable")
        data: dict[str, Any] = {name: getattr(self, name) for name in names}
        data["intervals"] = {name: [i.low, i.high] for name, i in self.intervals.items()}
        data["samples"] = self.samples.tolist()
        return data


@dataclass(frozen=True)
class Timer(metaclass=ExplainsMethods):
    """Measures how long functions take.

    >>> result = Timer().measure(lambda: sum(range(1000)), runs=20)
    >>> result.p50 < 0.01
    True

    `time_limit` (seconds) bounds a whole measurement: a slow function gets fewer samples and a note, a function that
    never returns raises TimeLimitError. `sample_seconds` is the minimum duration of one sample; long samples average
    over short disturbances. `compare` uses a fifth of it, because interleaving already does this.
    """

    time_limit: float = 120.0
    sample_seconds: float = 5e-3
    confidence: float = 0.95
    seed: int = 0

    def measure(
        self,
        func: Function | str,
        warmup: int = 3,
        runs: int = 100,
        *,
        processes: int = 0,
        time_limit: float | None = None,
    ) -> Measurement:
        """Time `func()`: discard `warmup` samples, then take `runs` samples.

        With `processes=n` the samples come from n fresh processes, one after the other, so that the result does not
        depend on one memory layout; a process that exceeds the time limit is killed, even inside compiled code. `func`
        may then also be "module:function", which a new interpreter imports.
        """
        check_count("warmup", warmup, 0)
        check_count("runs", runs, 1)
        check_count("processes", processes, 0)
        limit = check_limit(self.time_limit if time_limit is None else time_limit)
        if processes:
            from tilewise.profile.timing.processes import measure_in_processes

            series = measure_in_processes(func, warmup, runs, processes, limit, self.sample_seconds)
        elif callable(func):
            series = take_samples(func, warmup, runs, limit, self.sample_seconds)
        else:
            raise ConfigurationError(
                "Timer.measure needs a function; to measure 'module:function' by name, set processes=1 or more"
                if isinstance(func, str)
                else f"Timer.measure needs a function, such as lambda: model(x), not {type(func).__name__}"
            )
        return self.summarise(series)

    def compare(self, functions: Mapping[str, Function], runs: int = 100, **options: Any) -> Comparison:
        """Time several functions interleaved and compare each with the first; see `tilewise.profile.compare`."""
        from tilewise.profile.compare import compare

        return compare(self, functions, runs=runs, **options)

    def summarise(self, series: Series) -> Measurement:
        """Compute percentiles, confidence intervals and reliability checks from raw samples."""
        samples = np.asarray(series.samples, dtype=np.float64)
        p50, p95, p99 = (float(q) for q in np.quantile(samples, [0.5, 0.95, 0.99]))
        intervals = bootstrap_intervals(
            samples,
            {
                "p50": lambda resamples: np.quantile(resamples, 0.5, axis=1),
                "p95": lambda resamples: np.quantile(resamples, 0.95, axis=1),
                "p99": lambda resamples: np.quantile(resamples, 0.99, axis=1),
                "mean": lambda resamples: resamples.mean(axis=1),
            },
            self.confidence,
            seed=self.seed,
        )
        std = float(samples.std(ddof=1)) if len(samples) > 1 else 0.0
        return Measurement(
            samples=samples,
            p50=p50,
            p95=p95,
            p99=p99,
            mean=float(samples.mean()),
            std=std,
            intervals=intervals,
            calls_per_sample=series.calls,
            reasons=series.reasons + sample_reasons(samples),
            notes=series.notes,
            processes=series.processes,
        )


@dataclass
class Series:
    """Raw samples in seconds per call, with problems (`reasons`) and remarks (`notes`) about the measurement."""

    samples: list[float]
    calls: int
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    processes: int = 0


def take_samples(func: Function, warmup: int, runs: int, limit: float, sample_seconds: float) -> Series:
    """Choose the calls per sample, warm up, and take `runs` samples, fewer if `limit` seconds pass."""
    samples: list[float] = []
    calls = 1
    threads_before = _thread_ids()
    before = read_machine()
    cpu, start = time.process_time(), time.perf_counter()
    try:
        with time_limit(limit):
            calls = clock.calibrate(func, sample_seconds)
            for _ in range(warmup):
                clock.timed_calls(func, calls)
            before = read_machine()  # read again: the clock frequency has settled by now
            cpu, start = time.process_time(), time.perf_counter()
            for _ in range(runs):
                samples.append(clock.seconds_per_call(func, calls))
    except TimeIsUp:
        if not samples:
            raise TimeLimitError(
                f"the function did not complete one sample within {limit:g} s; {_TIME_LIMIT_ADVICE}"
            ) from None
    except Exception as error:
        raise MeasurementError(
            f"the function raised {type(error).__name__}: {error} (after {len(samples)} successful samples)"
        ) from error
    wall = time.perf_counter() - start
    # Below 50 ms the figure is unusable: idle worker threads of earlier work are still spinning.
    cores = (time.process_time() - cpu) / wall if wall > 0.05 else 0.0
    series = Series(samples, calls, machine_reasons(before, read_machine()))
    if len(samples) < runs:
        series.notes.append(f"only {len(samples)} of {runs} samples fit into the time limit of {limit:g} s")
    series.notes += _notes(samples, calls, cores, threads_before)
    return series


_TIME_LIMIT_ADVICE = "give a larger time_limit, or set processes=1, which can stop compiled code as well"


def _notes(samples: list[float], calls: int, cores: float, threads_before: set[str]) -> list[str]:
    """Return remarks for a reader of the times: very short calls, several cores in use, threads left running."""
    notes = []
    reading_ns, iteration_ns = clock.overhead_ns()
    if median(samples) < max(iteration_ns, reading_ns / calls) * clock.NANO:
        notes.append("the function is too short to time: a call takes no longer than one iteration of the timing loop")
    new_threads = _thread_ids() - threads_before
    if new_threads:
        threads = "1 thread" if len(new_threads) == 1 else f"{len(new_threads)} threads"
        notes.append(f"the function left {threads} running; their work after it returns is not part of its time")
    if cores > 1.15:
        notes.append(f"the function used {cores:.1f} cores; times are wall-clock")
    return notes


def _thread_ids() -> set[str]:
    """Return the ids of all threads of this process; without /proc, only those of Python's threads."""
    try:
        return {path.name for path in Path("/proc/self/task").iterdir()}
    except OSError:
        return {str(thread.ident) for thread in threading.enumerate()}


def check_count(name: str, value: int, minimum: int) -> None:
    """Raise ConfigurationError unless `value` is an integer of at least `minimum`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        text = repr(value) if isinstance(value, int | float | str) else f"a {type_name(value)}"
        raise ConfigurationError(f"{name} must be an integer of at least {minimum}, not {text}")


def check_limit(seconds: float) -> float:
    """Return the time limit as a float; raise ConfigurationError unless it is positive."""
    if not seconds > 0:
        raise ConfigurationError(f"time_limit must be a positive number of seconds, not {seconds!r}")
    return float(seconds)
