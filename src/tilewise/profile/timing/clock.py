"""The timing loop and its overhead.

A sample is the time of `calls` calls in a `for` loop, minus the time of the same loop when empty, minus one reading of
the clock, divided by `calls`. The cost of the call itself is not subtracted, because every caller pays it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import repeat
from time import perf_counter_ns
from typing import Any

NANO = 1e-9


def timed_calls(func: Callable[[], Any], calls: int) -> int:
    """Return the nanoseconds of `calls` calls, the loop included."""
    iterations = repeat(None, calls)
    start = perf_counter_ns()
    for _ in iterations:
        func()
    return perf_counter_ns() - start


def _timed_empty_loop(calls: int) -> int:
    """Return the nanoseconds of a loop of `calls` empty iterations."""
    iterations = repeat(None, calls)
    start = perf_counter_ns()
    for _ in iterations:
        pass
    return perf_counter_ns() - start


@lru_cache(maxsize=1)
def overhead_ns() -> tuple[float, float]:
    """Return the ns of a clock reading and of a loop iteration, measured once per process."""
    reading = min(_timed_empty_loop(0) for _ in range(200))
    iterations = 10_000
    iteration = min(_timed_empty_loop(iterations) - reading for _ in range(20)) / iterations
    return float(reading), max(iteration, 0.0)


def seconds_per_call(func: Callable[[], Any], calls: int) -> float:
    """Return the seconds per call over `calls` calls, without the overhead of loop and clock."""
    elapsed = timed_calls(func, calls)
    reading, iteration = overhead_ns()
    return max(elapsed - reading - calls * iteration, 0.0) * NANO / calls


def calibrate(func: Callable[[], Any], sample_seconds: float) -> int:
    """Return how many calls make a sample of at least `sample_seconds`."""
    calls = 1
    timed_calls(func, 1)  # the first call includes lazy set-up
    while True:
        elapsed = timed_calls(func, calls) * NANO
        if elapsed >= sample_seconds or calls >= 1 << 24:
            return calls
        # Aim 10 % above the target; at most 16 times more calls at once, because short timings are inaccurate.
        growth = sample_seconds / max(elapsed, 1e-9)
        calls = int(calls * min(max(growth * 1.1, 1.5), 16.0)) + 1


def time_interleaved(
    runs: Sequence[Callable[[], Any]], rounds: int, *, calls: int | Sequence[int] = 1, warmup: int = 1
) -> list[list[float]]:
    """Time functions interleaved; return `rounds` samples, in seconds per call, for each function.

    A sample is `calls` calls (one number for all functions, or one per function). `warmup` rounds are discarded.
    """
    samples: list[list[float]] = [[] for _ in runs]
    counts = [calls] * len(runs) if isinstance(calls, int) else calls
    for number in range(warmup + rounds):
        for run, count, series in zip(runs, counts, samples, strict=True):
            seconds = timed_calls(run, count) * NANO / count
            if number >= warmup:
                series.append(seconds)
    return samples
