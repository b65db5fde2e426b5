"""Timing several callables in turns: what disturbs the machine for a while then disturbs all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tilewise.profile.timing.clock import NANO, timed_calls


def take_turns(
    runs: Sequence[Callable[[], Any]], rounds: int, *, calls: int | Sequence[int] = 1, warmup: int = 1
) -> list[list[float]]:
    """Seconds a call of each: `rounds` samples of `calls` calls (of each its own number, where there are several),
    after `warmup` rounds that do not count."""
    samples: list[list[float]] = [[] for _ in runs]
    counts = [calls] * len(runs) if isinstance(calls, int) else calls
    for number in range(warmup + rounds):
        for run, count, own in zip(runs, counts, samples, strict=True):
            seconds = timed_calls(run, count) * NANO / count
            if number >= warmup:
                own.append(seconds)
    return samples
