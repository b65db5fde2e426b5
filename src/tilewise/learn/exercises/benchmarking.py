"""Checks of the benchmarking lesson: taking turns, an interval for a ratio, a score that one number cannot buy."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from tilewise.learn.asking import require, same_number
from tilewise.learn.checking import Exercise


def _take_turns(answer: Callable[..., Any]) -> None:
    """Check the exercise `take_turns`."""
    calls: list[str] = []
    now = [0.0]
    costs = {"a": 3.0, "b": 5.0}

    def run(name: str) -> Callable[[], None]:
        def call() -> None:
            calls.append(name)
            now[0] += costs[name]

        return call

    times = answer({"a": run("a"), "b": run("b")}, 6, lambda: now[0])
    require(set(times) == {"a", "b"}, "take_turns must give a list of times for each name")
    for name in costs:
        require(len(times[name]) == 6, f"take_turns gave {len(times[name])} times for {name!r}, and 6 were asked for")
        feedback = (
            f"take_turns gave {times[name]} for {name!r}, and each call takes {costs[name]}: clock around the call"
        )
        require(all(time == costs[name] for time in times[name]), feedback)
    longest = max(len(run) for run in "".join(calls).replace("ab", "a b").replace("ba", "b a").split())
    feedback = f"the calls went {''.join(calls)}: a slow minute then hits one function only; alternate after each call"
    require(longest <= 2 and any(x != y for x, y in pairwise(calls)), feedback)


def _interval(answer: Callable[..., Any]) -> None:
    """Check the exercise `ratio_interval`."""
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(40):
        old, new = rng.lognormal(0.0, 0.2, 60), rng.lognormal(-0.5, 0.2, 60)
        low, high = answer(old, new, np.random.default_rng(trial))
        require(low <= high, f"ratio_interval gave ({low:.3f}, {high:.3f}): the lower end comes first")
        require(
            high - low < 0.6,
            f"ratio_interval gave ({low:.3f}, {high:.3f}): draw the medians again, not the samples' spread",
        )
        require(
            high - low > 0.01, f"ratio_interval gave ({low:.3f}, {high:.3f}): draw both lists anew, with replacement"
        )
        covered += low <= np.exp(0.5) <= high
    feedback = (
        f"ratio_interval held the true speed-up in {covered} of 40 cases: resample both, take "
        "median(old) / median(new), and cut 2.5 % off each side"
    )
    require(covered >= 33, feedback)


def _score(answer: Callable[..., Any]) -> None:
    """Check the exercise `score`."""
    for gains, accuracy, floor in (
        ((8.0, 1.0, 1.0), 0.99, 0.98),
        ((2.0, 2.0, 2.0), 0.99, 0.98),
        ((9.0, 4.0, 0.5), 0.9, 0.9),
    ):
        call = f"score({gains}, {accuracy}, {floor})"
        hint = "the geometric mean: doubling any one gain is worth the same"
        same_number(answer(gains, accuracy, floor), float(np.prod(gains) ** (1 / 3)), call, hint)
    same_number(
        answer((100.0, 100.0, 100.0), 0.5, 0.98),
        0.0,
        "score of a model below the floor",
        "wrong answers fast are worth nothing",
    )


EXERCISES = (
    Exercise("take_turns", "functions timed in turns", _take_turns),
    Exercise("ratio_interval", "a bootstrap interval of a speed-up", _interval),
    Exercise("score", "one score out of three gains, gated by accuracy", _score),
)
