"""Timing several callables in turns: what disturbs the machine for a while then disturbs all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tilewise.profile.timing.clock import NANO, timed_calls


def take_turns(runs: Sequence[Callable[[], Any]], rounds: int, *, calls: int = 1, warmup: int = 1) -> list[list[float]]:
    """Seconds a call of each: `rounds` samples of `calls` calls, after `warmup` rounds that do not count."""
    samples: list[list[float]] = [[] for _ in runs]
    for number in range(warmup + rounds):
        for run, own in zip(runs, samples, strict=True):
            seconds = timed_calls(run, calls) * NANO / calls
            if number >= warmup:
                own.append(seconds)
    return samples
