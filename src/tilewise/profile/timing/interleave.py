"""Interleaved timing of several functions: a temporary disturbance of the machine then affects all of them equally."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tilewise.profile.timing.clock import NANO, timed_calls


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
