"""The timed loop and its own cost.

A sample is the time of `calls` calls in a bare `for` loop, less what the same loop costs when empty and less one
reading of the clock, divided by `calls`. The call itself is part of what a caller pays and is not subtracted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import repeat
from time import perf_counter_ns
from typing import Any

NANO = 1e-9


def timed_calls(func: Callable[[], Any], calls: int) -> int:
    """Nanoseconds of `calls` calls, loop included."""
    iterations = repeat(None, calls)
    start = perf_counter_ns()
    for _ in iterations:
        func()
    return perf_counter_ns() - start


def _timed_nothing(calls: int) -> int:
    iterations = repeat(None, calls)
    start = perf_counter_ns()
    for _ in iterations:
        pass
    return perf_counter_ns() - start


@lru_cache(maxsize=1)
def own_cost_ns() -> tuple[float, float]:
    """(clock reading, one turn of the empty loop) in nanoseconds, the best of many; measured once a process."""
    clock = min(_timed_nothing(0) for _ in range(200))
    turns = 10_000
    turn = min(_timed_nothing(turns) - clock for _ in range(20)) / turns
    return float(clock), max(turn, 0.0)


def seconds_per_call(func: Callable[[], Any], calls: int) -> float:
    """One sample: seconds a call, with the loop's and the clock's cost subtracted; never negative."""
    elapsed = timed_calls(func, calls)
    clock, turn = own_cost_ns()
    return max(elapsed - clock - calls * turn, 0.0) * NANO / calls


def calibrate(func: Callable[[], Any], sample_seconds: float) -> int:
    """How many calls make a sample of at least `sample_seconds`; a power of two times a small factor, at least 1."""
    calls = 1
    timed_calls(func, 1)  # the first call pays for lazy set-up
    while True:
        elapsed = timed_calls(func, calls) * NANO
        if elapsed >= sample_seconds or calls >= 1 << 24:
            return calls
        growth = sample_seconds / max(elapsed, 1e-9)
        calls = int(calls * min(max(growth * 1.1, 1.5), 16.0)) + 1
