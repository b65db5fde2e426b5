"""Checks of the benchmarking lesson: taking turns, an interval for a ratio, a score that one number cannot buy.

`take_turns` is called with functions that advance a simulated clock. A wrong `ratio_interval` is recognized by the mean
places of its two ends, compared with those of known mistakes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from tilewise.learn.checking import Exercise, Wrong, require
from tilewise.learn.differential import Example, Mistakes, close, differential

Functions = dict[str, Callable[[], Any]]
Clock = Callable[[], float]
Times = dict[str, list[float]]

# --- take_turns ---


def _simulate(function: Callable[..., Any], names: str, rounds: int) -> tuple[Any, Any]:
    """Call an answer to `take_turns` with functions on a simulated clock; return its times and the order of calls."""
    calls: list[int] = []
    now = [100.0]

    def run(at: int) -> Callable[[], None]:
        """Return a function whose duration on the simulated clock changes from round to round."""

        def call() -> None:
            now[0] += 1.5 + at + 3 * ((5 * calls.count(at)) % 7)
            calls.append(at)

        return call

    times = function({name: run(at) for at, name in enumerate(names)}, rounds, lambda: now[0])
    return times, np.array(calls)


def take_turns(names: str, rounds: int) -> Any:
    return _simulate(_time_calls, names, rounds)


def _time_calls(functions: Functions, rounds: int, clock: Clock) -> Times:
    """Time each function once in each round, as the answer has to."""
    times: Times = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = clock()
            function()
            times[name].append(clock() - start)
    return times


def _changed(names: str, rounds: int, transform: Callable[[Any], Any]) -> Any:
    times, calls = take_turns(names, rounds)
    return {name: transform(seconds) for name, seconds in times.items()}, calls


def _turns_fault(result: Any, right: Any, names: str, rounds: int) -> str:
    """Return what is wrong with the times, or with the order of the calls; "" if nothing is."""
    (times, calls), costs = result, right[0]
    for name in names:
        if not isinstance(times[name], list) or not all(isinstance(time, int | float) for time in times[name]):
            return f"gave {times[name]!r:.60} for {name!r}: give a list with the time of each round, in seconds; "
        if len(times[name]) != rounds:
            gave = f"gave {len(times[name])} times for {name!r}, and each function is called once a round"
            return f"{gave}: one time for each of the {rounds} rounds was asked for, in its own list; "
    if len(calls) != rounds * len(names):
        return f"called the functions {len(calls)} times in {rounds} rounds of {len(names)}: call each once a round; "
    order = "".join(names[at] for at in calls)
    if any(len(set(order[i : i + len(names)])) < len(names) for i in range(0, len(order), len(names))):
        return (
            f"called them in the order {order}: a slow minute then hits one function only; alternate after each call; "
        )
    for name in names:
        if not np.allclose(times[name], costs[name]):
            return f"gave {np.round(times[name], 2).tolist()} for {name!r}, and its calls took {costs[name]}: "
    return ""


MISTAKES: dict[str, Mistakes] = {
    "take_turns": [
        (
            "clock() gives seconds",
            lambda names, rounds: _changed(names, rounds, lambda times: [1e3 * t for t in times]),
        ),
        ("keep the order of the rounds: do not sort", lambda names, rounds: _changed(names, rounds, sorted)),
    ],
    "ratio_interval": [
        ("a mean follows a few slow runs: take medians", lambda old, new: _bootstrap(old, new, np.mean)),
        ("take medians, not the minimum", lambda old, new: _bootstrap(old, new, np.min)),
        ("divide, do not subtract", lambda old, new: _bootstrap(old, new, combine=np.subtract)),
        (
            "it is upside down: median(old) / median(new)",
            lambda old, new: _bootstrap(old, new, combine=lambda a, b: b / a),
        ),
        ("that is its logarithm: take exp", lambda old, new: _bootstrap(old, new, combine=lambda a, b: np.log(a / b))),
        ("5 % off each side leave 90 %", lambda old, new: _bootstrap(old, new, ends=(5, 95))),
        ("0.5 % off each side leave 99 %", lambda old, new: _bootstrap(old, new, ends=(0.5, 99.5))),
        ("nothing is cut off", lambda old, new: _bootstrap(old, new, ends=(0, 100))),
        ("one standard deviation leaves 68 %", lambda old, new: _bootstrap(old, new, ends=(15.9, 84.1))),
        ("np.percentile takes percent, np.quantile shares", lambda old, new: _bootstrap(old, new, ends=(0.025, 0.975))),
        ("new is not drawn again", lambda old, new: _bootstrap(old, new, resample="old")),
        ("old is not drawn again", lambda old, new: _bootstrap(old, new, resample="new")),
        ("fewer draws than there are times make it wider", lambda old, new: _bootstrap(old, new, share=0.5)),
        ("without replacement, medians stay the same", lambda old, new: 2 * (np.median(old) / np.median(new),)),
        (
            "take medians of resampled lists, not percentiles of single ratios",
            lambda old, new: np.percentile(old / new, (2.5, 97.5)),
        ),
    ],
    "score": [
        (
            "below the floor the score is 0",
            lambda gains, accuracy, floor: score(gains, 1, 0),
        ),
        (
            "below the floor the score is 0, not above it",
            lambda gains, accuracy, floor: 0.0 if accuracy > floor else score(gains, 1, 0),
        ),
    ],
}

_check_turns = differential(
    take_turns,
    lambda: [Example(("ab", 6)), Example(("abc", 4)), Example(("a", 3), "for one function")],
    lambda rng: ("".join(rng.permutation(list("abcd"))[: rng.integers(1, 5)]), int(rng.integers(1, 7))),
    "read the clock just before and just after each call",
    fault=_turns_fault,
    mistakes=MISTAKES["take_turns"],
)


def _take_turns(answer: Callable[..., Any]) -> None:
    """Check the exercise `take_turns` with functions on a simulated clock."""

    def simulated(names: str, rounds: int) -> Any:
        """Run the answer on the simulated clock and return its times."""
        times, calls = _simulate(answer, names, rounds)
        require(
            isinstance(times, dict) and set(times) == set(names),
            f"take_turns gave {times!r:.60}: it must give a dict with a list of times for each name",
        )
        return times, calls

    _check_turns(simulated)


# --- ratio_interval ---

_TRIALS = 12  # enough to tell a 90 % interval, 0.84 times as wide, from one of 95 %
Ends = tuple[float, float]


def _samples(count: int = 60, count_new: int = 60) -> list[tuple[Any, Any]]:
    """Return pairs of timing samples to test, skewed as real timings are."""
    rng = np.random.default_rng(0)
    pairs = []
    for _ in range(_TRIALS):
        old, new = rng.lognormal(0.0, 0.2, count), rng.lognormal(-0.5, 0.3, count_new)
        old[rng.permutation(count)[: count // 10]] *= 5  # a few slow runs, which a median ignores and a mean does not
        pairs.append((old, new))
    return pairs


def ratio_interval(old: Any, new: Any) -> Ends:
    return _bootstrap(old, new)


def _bootstrap(
    old: Any,
    new: Any,
    statistic: Any = np.median,
    ends: Sequence[float] = (2.5, 97.5),
    share: float = 1,
    resample: str = "both",
    combine: Any = np.divide,
    ratios: int = 250,
) -> Ends:
    """Compute a bootstrap interval of the ratio of medians, or, by other settings, that of a common mistake.

    `share` is the number of draws from a list, relative to its length.
    """
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, len(samples), (ratios, round(share * len(samples)))) for samples in (old, new)]
    values = [statistic(samples[at], axis=1) for samples, at in zip((old, new), rows, strict=True)]
    for at, name in enumerate(("old", "new")):
        if resample not in ("both", name):
            values[at] = statistic((old, new)[at][None], axis=1)
    low, high = np.percentile(combine(*values), ends)
    return float(low), float(high)


def _interval(answer: Callable[..., Any]) -> None:
    """Check the exercise `ratio_interval`: its use of the generator, order, and mean position of its ends."""
    intervals = _intervals(answer, _samples())
    old, new = _samples()[0]
    seeds = [_interval_of(answer, old, new, seed) for seed in range(4)]
    changes = len(set(seeds)) > 1
    require(seeds[0] == intervals[0], "the same rng gave another interval: draw with rng and nothing else")
    for low, high in intervals:
        text = f"ratio_interval gave ({low:.3f}, {high:.3f}): "
        require(low <= high, f"{text}give the lower end of the interval, then the upper one")
    ends, right, centre, width = _compare_ends(intervals, _samples())
    gave, expected = (f"({low:.3f}, {high:.3f})" for low, high in (ends, right))
    text = f"ratio_interval gave {gave} on average, and {expected} is right: "
    noise = float(np.std(seeds, axis=0).max()) / max(ends[1] - ends[0], right[1] - right[0])
    noisy = "a few ratios make the ends a matter of chance: draw a thousand or more"
    if abs(centre - 1) >= 0.06 or not 0.91 < width < 1.1:
        raise Wrong(text + (noisy if noise > 0.08 else _nearest_mistake(ends, right[1] - right[0])))
    for (low, high), pair in zip(intervals, _samples(), strict=False):
        single = _bootstrap(*pair, ratios=2000)
        off = max(abs(low - single[0]), abs(high - single[1])) / (single[1] - single[0])
        text = f"ratio_interval gave ({low:.3f}, {high:.3f}), and ({single[0]:.3f}, {single[1]:.3f}) is right: "
        # Of the width, simulated: two hundred ratios give at most 0.21, a thousand 0.10.
        require(off < 0.4, text + "old[i] and new[i] are no pair, so resample each list by itself; do not round")
    times = np.linspace(1.0, 2.0, 60)  # resampled in pairs, the ratio is always 2
    low, high = _interval_of(answer, 2 * times, times, 0)
    advice = "old[i] and new[i] are no pair: take the median of each list, and resample each by itself"
    require(high - low > 0.1, f"ratio_interval gave ({low:.3f}, {high:.3f}) where old is 2 * new: {advice}")
    ends, right, _, width = _compare_ends(_intervals(answer, _samples(20, 180)), _samples(20, 180))
    gave, expected = (f"({low:.3f}, {high:.3f})" for low, high in (ends, right))
    advice = "resample each list by itself, with as many draws as there are times in it"
    text = f"ratio_interval gave {gave} on average for 20 old and 180 new times, and {expected} is right: "
    require(0.88 < width < 1.14, text + advice)
    # Of the width, simulated: a thousand ratios give at most 0.04, two hundred 0.05, the extremes of twenty 0.065.
    require(noise <= 0.06, f"ratio_interval gave {seeds[0]}, then {seeds[1]} for the same times: {noisy}")
    require(changes, "another rng gave the same interval: draw with rng, the argument, and nothing else")


def _intervals(answer: Callable[..., Any], samples: list[tuple[Any, Any]]) -> list[Ends]:
    """Call the answer on a few samples, and on all of them unless these few are clearly right."""
    intervals: list[Ends] = []
    for count in (4, _TRIALS):
        for trial in range(len(intervals), count):
            intervals.append(_interval_of(answer, *samples[trial], trial))
        *_, centre, width = _compare_ends(intervals, samples)
        if abs(centre - 1) < 0.03 and abs(width - 1) < 0.05:
            break
    return intervals


def _compare_ends(intervals: list[Ends], samples: list[tuple[Any, Any]]) -> tuple[Any, Any, float, float]:
    """Return the mean ends, the right ones, and the ratios of their centres and widths."""
    ends = np.mean(intervals, axis=0)
    right = np.mean([_bootstrap(*pair, ratios=2000) for pair in samples[: len(intervals)]], axis=0)
    return ends, right, ends.sum() / right.sum(), (ends[1] - ends[0]) / (right[1] - right[0])


def _interval_of(answer: Callable[..., Any], old: Any, new: Any, seed: int) -> Ends:
    """Call the answer with a new generator; raise Wrong if it changes its arguments."""
    mine = old.copy(), new.copy()
    result = answer(*mine, np.random.default_rng(seed))
    require(close(mine, (old, new), 0), "ratio_interval changed the caller's times: work on a copy")
    two = (
        isinstance(result, tuple | list | np.ndarray)
        and len(result) == 2
        and all(np.shape(end) == () for end in result)
    )
    require(
        two and np.isfinite(np.asarray(result, float)).all(),
        f"ratio_interval gave {result!r:.60}, not two numbers (low, high)",
    )
    return float(result[0]), float(result[1])


def _nearest_mistake(ends: Any, width: float) -> str:
    """Return the hint of the known mistake whose interval ends are closest on average; "" if none is."""
    distances = [(float(np.abs(position - ends).max() / width), hint) for hint, position in _mistaken_places()]
    distance, hint = min(distances, key=lambda entry: entry[0])
    advice = "a thousand ratios or more of medians, each of as many draws from its own list as there are times"
    return f"{f'{hint}; ' if distance < 0.05 else ''}cut 2.5 % off each side, so that 95 % stay, of {advice}"


@cache
def _mistaken_places() -> list[tuple[str, Any]]:
    """Return (hint, mean interval ends) of each known mistake."""
    samples = _samples()
    return [(hint, np.mean([mistake(*p) for p in samples], axis=0)) for hint, mistake in MISTAKES["ratio_interval"]]


# --- score ---


def score(gains: Sequence[float], accuracy: float, floor: float) -> float:
    return 0.0 if accuracy < floor else float(np.prod(gains) ** (1 / 3))


def _draw_score(rng: np.random.Generator) -> tuple[tuple[float, ...], float, float]:
    floor = float(rng.uniform(0.2, 0.9))
    return tuple(rng.lognormal(0, 3, 3).tolist()), floor + float(rng.choice((-0.1, 0.0, 0.001, 0.1))), floor


EXERCISES = (
    Exercise("take_turns", "functions timed in turns", _take_turns),
    Exercise("ratio_interval", "a bootstrap interval of a speed-up", _interval),
    Exercise(
        "score",
        "one score out of three gains, gated by accuracy",
        differential(
            score,
            lambda: [
                Example((gains, accuracy, floor), about)
                for gains, accuracy, floor, about in (
                    ((8.0, 1.0, 1.0), 0.99, 0.98, ""),
                    ((2.0, 2.0, 2.0), 0.99, 0.98, "where all gains are equal"),
                    ((9.0, 4.0, 0.5), 0.96, 0.9, "where a gain is below 1"),
                    ((3.0, 7.0, 5.0), 1.0, 0.9, ""),
                    ((9.0, 4.0, 2.0), 0.9, 0.9, "where the accuracy is at the floor"),
                    ((2.0, 6.0, 5.0), 0.45, 0.4, "where the floor is low"),
                    ((100.0, 100.0, 100.0), 0.5, 0.98, "below the floor"),
                    ((3.0, 1.5, 2.0), 0.985, 0.99, "below the floor"),
                )
            ],
            _draw_score,
            "the geometric mean is the third root of the product; accuracy decides only whether the score is 0",
            mistakes=MISTAKES["score"],
        ),
    ),
)
