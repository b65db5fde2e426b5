"""Checks of the benchmarking lesson: taking turns, an interval for a ratio, a score that one number cannot buy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise.learn.checking import Exercise, require, same_number


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
        gave = f"take_turns gave {times[name]} for {name!r}"
        require(isinstance(times[name], list), f"{gave}: give a list with the time of each round")
        require(len(times[name]) == 6, f"{gave}: one time for each of the 6 rounds was asked for")
        for seconds in times[name]:
            same_number(
                seconds,
                costs[name],
                f"{gave}, and each call takes {costs[name]}: it",
                "read the clock just before and just after each call",
            )
    once = len(calls) == 12
    require(once, f"take_turns called the functions {len(calls)} times in 6 rounds of 2: call each once a round")
    rounds = [set(calls[i : i + 2]) for i in range(0, 12, 2)]
    feedback = f"the calls went {''.join(calls)}: a slow minute then hits one function only; alternate after each call"
    require(rounds == [{"a", "b"}] * 6, feedback)


def _interval(answer: Callable[..., Any]) -> None:
    """Check the exercise `ratio_interval`: its order, its centre and its width, beside a bootstrap of medians."""
    rng = np.random.default_rng(0)
    centres, widths = [], []
    for trial in range(_TRIALS):
        old, new = rng.lognormal(0.0, 0.2, 60), rng.lognormal(-0.5, 0.2, 60)
        old[rng.permutation(60)[:6]] *= 5  # a few slow runs, which a median ignores and a mean does not
        low, high = answer(old, new, np.random.default_rng(trial))
        if not trial:
            again = answer(old, new, np.random.default_rng(trial))
            require((low, high) == tuple(again), "the same rng gave another interval: draw with rng and nothing else")
        right_low, right_high = _bootstrap(old, new, rng)
        text = f"ratio_interval gave ({low:.3f}, {high:.3f})"
        require(low <= high, f"{text}: give the lower end of the interval, then the upper one")
        require(high > 1, f"{text}: it is median(old) / median(new), so above 1 where new is faster")
        require(high - low < 2.5, f"{text}: draw the medians again, not the samples' spread")
        require(high - low > 0.01, f"{text}: draw both lists anew, with replacement")
        centres.append((low + high) / (right_low + right_high))
        widths.append((high - low) / (right_high - right_low))
    centre, width = float(np.mean(centres)), float(np.mean(widths))
    advice = "it is median(old) / median(new), because a mean follows a few slow runs"
    require(abs(centre - 1) < 0.06, f"ratio_interval is centred at {centre:.2f} times the right place: {advice}")
    advice = "cut 2.5 % off each side" if width > 0.79 else "resample both lists"
    advice += " of a thousand ratios or more, each from as many draws as there are times"
    require(0.91 < width < 1.1, f"ratio_interval is {width:.2f} times as wide as a 95 % interval: {advice}")
    times = np.linspace(1.0, 2.0, 60)  # resampled in pairs, the ratio is always 2
    low, high = answer(2 * times, times, np.random.default_rng(0))
    advice = "old[i] and new[i] are no pair: take the median of each list, and resample each by itself"
    require(high - low > 0.1, f"ratio_interval gave ({low:.3f}, {high:.3f}) where old is 2 * new: {advice}")


_TRIALS = 12  # enough to tell a 90 % interval, 0.84 times as wide, from one of 95 %


def _bootstrap(old: Any, new: Any, rng: np.random.Generator) -> tuple[float, float]:
    """Return a 95 % bootstrap interval of the ratio of medians."""
    medians = [np.median(samples[rng.integers(0, 60, (2000, 60))], axis=1) for samples in (old, new)]
    low, high = np.quantile(medians[0] / medians[1], [0.025, 0.975])
    return float(low), float(high)


def _score(answer: Callable[..., Any]) -> None:
    """Check the exercise `score`."""
    for gains, accuracy, floor in (
        ((8.0, 1.0, 1.0), 0.99, 0.98),
        ((2.0, 2.0, 2.0), 0.99, 0.98),
        ((9.0, 4.0, 0.5), 0.99, 0.9),
        ((9.0, 4.0, 2.0), 0.9, 0.9),
    ):
        call = f"score({gains}, {accuracy}, {floor})"
        hint = "the geometric mean is the third root of the product; accuracy decides only whether the score is 0"
        mistakes = [(0.0, "an accuracy at the floor is not below it")] if accuracy == floor else []
        right = float(np.prod(gains) ** (1 / 3))
        same_number(answer(gains, accuracy, floor), right, call, hint, mistakes=mistakes)
    same_number(
        answer((100.0, 100.0, 100.0), 0.5, 0.98),
        0.0,
        "score of a model below the floor",
        "below the floor the score is 0, because fast wrong answers are worth nothing",
    )


EXERCISES = (
    Exercise("take_turns", "functions timed in turns", _take_turns),
    Exercise("ratio_interval", "a bootstrap interval of a speed-up", _interval),
    Exercise("score", "one score out of three gains, gated by accuracy", _score),
)
