"""Timer: how long a function takes, with an interval and an opinion on whether to trust it.

Short functions are called many times per sample, the loop's own cost is subtracted, and the machine is watched while
the samples are taken. `compare` (see compare.py) interleaves several functions, which is the only honest way to say
that one is faster on a machine that has other things to do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise.errors import ConfigurationError
from tilewise.profile.timing import clock
from tilewise.profile.timing.limits import MeasurementError, TimeIsUp, TimeLimitError, time_limit
from tilewise.profile.timing.stability import machine_reasons, read_machine, sample_reasons
from tilewise.profile.timing.statistics import Floats, Interval, bootstrap_intervals
from tilewise.profile.units import seconds

if TYPE_CHECKING:
    from tilewise.profile.compare import Comparison

Function = Callable[[], Any]


@dataclass(frozen=True)
class Measurement:
    """Seconds per call: every sample, their percentiles, and what speaks against trusting them.

    A sample is the mean over `calls_per_sample` calls, so the tail percentiles are those of samples, not single calls,
    unless that number is 1. `intervals` has a confidence interval for each of p50, p95, p99 and mean.
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
        """True when nothing speaks against the figures; `reasons` says what does."""
        return not self.reasons

    @property
    def minimum(self) -> float:
        return float(self.samples.min())

    def __str__(self) -> str:
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
        """Plain data for JSON."""
        names = ("p50", "p95", "p99", "mean", "std", "calls_per_sample", "reasons", "notes", "processes", "stable")
        data: dict[str, Any] = {name: getattr(self, name) for name in names}
        data["intervals"] = {name: [i.low, i.high] for name, i in self.intervals.items()}
        data["samples"] = self.samples.tolist()
        return data


@dataclass(frozen=True)
class Timer:
    """Times functions.

    >>> result = Timer().measure(lambda: sum(range(1000)), runs=20)
    >>> result.p50 < 0.01
    True

    `time_limit` (seconds) bounds a whole measurement: a long function gets fewer samples and a note, one that never
    returns raises TimeLimitError. `sample_seconds` is how long one sample should last at least; long samples average
    over short disturbances. `compare` takes samples of a fifth of that, since it interleaves.
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
        """Time `func()`: `warmup` samples thrown away, `runs` kept.

        With `processes=n` the samples come from n fresh processes in turn, so that the luck of one memory layout does
        not decide; a process that outlives the time limit is killed, even inside compiled code. `func` may then also
        be "module:function", imported by a new interpreter.
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
                "give Timer.measure a function; a name 'module:function' needs processes=1 or more"
            )
        return self.summarise(series)

    def compare(self, functions: Mapping[str, Function], runs: int = 100, **options: Any) -> Comparison:
        """Time several functions interleaved and test each against the first; see `tilewise.profile.compare`."""
        from tilewise.profile.compare import compare

        return compare(self, functions, runs=runs, **options)

    def summarise(self, series: Series) -> Measurement:
        """Turn raw samples into percentiles, intervals and reasons."""
        samples = np.asarray(series.samples, dtype=np.float64)
        p50, p95, p99 = (float(q) for q in np.quantile(samples, [0.5, 0.95, 0.99]))
        intervals = bootstrap_intervals(
            samples,
            {
                "p50": lambda drawn: np.quantile(drawn, 0.5, axis=1),
                "p95": lambda drawn: np.quantile(drawn, 0.95, axis=1),
                "p99": lambda drawn: np.quantile(drawn, 0.99, axis=1),
                "mean": lambda drawn: drawn.mean(axis=1),
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
    """Samples as taken, with what was noticed while taking them."""

    samples: list[float]
    calls: int
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    processes: int = 0


def take_samples(func: Function, warmup: int, runs: int, limit: float, sample_seconds: float) -> Series:
    """Calibrate, warm up and sample inside the time limit."""
    samples: list[float] = []
    calls = 1
    threads_before = _thread_names()
    before = read_machine()
    cpu, start = time.process_time(), time.perf_counter()
    try:
        with time_limit(limit):
            calls = clock.calibrate(func, sample_seconds)
            for _ in range(warmup):
                clock.timed_calls(func, calls)
            before = read_machine()  # again: by now the clock frequency has settled
            cpu, start = time.process_time(), time.perf_counter()
            for _ in range(runs):
                samples.append(clock.seconds_per_call(func, calls))
    except TimeIsUp:
        if not samples:
            raise TimeLimitError(
                f"the function had not been timed once when its {limit:g} s were over; {_ADVICE}"
            ) from None
    except Exception as error:
        raise MeasurementError(
            f"the function raised {type(error).__name__}: {error} (after {len(samples)} good samples)"
        ) from error
    wall = time.perf_counter() - start
    cores = (time.process_time() - cpu) / wall if wall > 0.05 else 0.0  # shorter, idle threads still spin down
    series = Series(samples, calls, machine_reasons(before, read_machine()))
    if len(samples) < runs:
        series.notes.append(f"only {len(samples)} of {runs} samples fit into the time limit of {limit:g} s")
    series.notes += _notes(samples, calls, cores, threads_before)
    return series


_ADVICE = "give a larger time_limit, or processes=1 to have it killed even inside compiled code"


def _notes(samples: list[float], calls: int, cores: float, threads_before: set[str]) -> list[str]:
    notes = []
    reading, turn = clock.own_cost_ns()
    if np.median(samples) < max(turn, reading / calls) * clock.NANO:
        notes.append(
            "the function returns at once: what is left after subtracting the loop is within the loop's own cost"
        )
    started = _thread_names() - threads_before
    if started:
        threads = "1 thread" if len(started) == 1 else f"{len(started)} threads"
        notes.append(f"the function left {threads} running; work they do after it returns is not in its time")
    if cores > 1.15:
        notes.append(f"the function kept {cores:.1f} cores busy; times are wall-clock")
    return notes


def _thread_names() -> set[str]:
    """Kernel ids of all threads, native ones included, where the system lists them."""
    try:
        return {path.name for path in Path("/proc/self/task").iterdir()}
    except OSError:
        return {str(thread.ident) for thread in threading.enumerate()}


def check_count(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{name} must be an integer of at least {least}, not {value!r}")


def check_limit(seconds: float) -> float:
    if not seconds > 0:
        raise ConfigurationError(f"time_limit must be a positive number of seconds, not {seconds!r}")
    return float(seconds)
