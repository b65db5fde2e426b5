"""Checks of the cost-model lesson: what a ranking is worth, how it orders pairs, numbers a tile has by itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.costmodel.metrics import opa, top_k_error
from tilewise.learn.checking import Exercise
from tilewise.learn.differential import Example, differential


def slowdown(runtimes: Any, scores: Any, k: int) -> float:
    return float(top_k_error(runtimes, scores, k))


def _slowdown_cases() -> list[Example]:
    """Return test inputs for `slowdown`, with a remark on what is special about each."""
    rng = np.random.default_rng(0)
    about = {1: "for one configuration", 4: "where k is larger than the number of configurations"}
    return [
        Example((rng.uniform(1, 9, count), rng.standard_normal(count), k), about.get(count, ""))
        for count, k in ((30, 5), (40, 3), (12, 1), (50, 4), (1, 1), (5, 2), (4, 10))
    ] + [Example((np.linspace(5.0, 1.0, 9), np.arange(9.0), 4), "where the lowest scores are the slowest")]


def _of_best(choose: Any, scores_of: Any = lambda scores: scores) -> Any:
    """Return a `slowdown` function that picks among the k best, or scores, in another (mistaken) way."""

    def mistaken(runtimes: Any, scores: Any, k: int) -> Any:
        return choose(runtimes[np.argsort(scores_of(scores))[:k]]) / runtimes.min() - 1

    return mistaken


_BEST_OF_ALL = "divide by the best of all, and take 1 away"


def ordered_pairs(runtimes: Any, scores: Any) -> float:
    return float(opa(runtimes, scores))


def _pair_cases() -> list[Example]:
    """Return test inputs for `ordered_pairs`, with a remark on what is special about each."""
    rng = np.random.default_rng(1)
    cases = [
        Example(
            (rng.permutation(count).astype(float), rng.standard_normal(count)),
            "for two configurations" if count == 2 else "",
        )
        for count in (25, 6, 40, 2)
    ]
    equal_runtimes = (np.array([1.0, 1.0, 2.0, 2.0, 3.0]), np.array([0.3, 0.1, 0.9, 0.2, 0.6]))
    equal_scores = (np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.3, 0.3, 0.9, 0.3]))
    return [
        *cases,
        Example(equal_runtimes, "with equal runtimes, which have no right order: leave such a pair out"),
        Example(equal_scores, "with equal scores, which count as a pair but are not in the right order"),
    ]


def _share(counts: Any, agrees: Any, total: Any = None) -> Any:
    """Return an `ordered_pairs` function that counts other pairs: a mistake."""

    def mistaken(r: Any, s: Any) -> float:
        """Return the share of counted pairs that agree."""
        pairs = [
            (r[i], r[j], s[i], s[j]) for i in range(len(r)) for j in range(len(r)) if i != j and counts(r[i], r[j])
        ]
        number = total(len(r)) if total else len(pairs)
        return sum(float(agrees(*pair)) for pair in pairs) / number

    return mistaken


_BOTH = "of all pairs with different runtimes, the share whose scores are ordered the same way"


def _without_equal_scores(r: Any, s: Any) -> float:
    pairs = [(s[i], s[j]) for i in range(len(r)) for j in range(len(r)) if r[i] < r[j] and s[i] != s[j]]
    return float(np.mean([x < y for x, y in pairs]))


def tile_numbers(shape: Any, tile: Any) -> dict[str, float]:
    return _tile_numbers(shape, tile)


def _tile_numbers(shape: Any, tile: Any, count: Any = lambda size, step: -(-size // step)) -> dict[str, float]:
    """Compute the exercise's numbers of tiles, with `count` tiles per dimension."""
    counts = [count(size, step) for size, step in zip(shape, tile, strict=True)]
    padded = np.prod([number * step for number, step in zip(counts, tile, strict=True)])
    m, n, k = tile
    return {
        "tiles": counts[0] * counts[1],
        "waste": 1 - float(np.prod(shape)) / float(padded) if padded else 0.0,
        "bytes": 4 * (m * k + k * n + m * n),
    }


def _with(name: str, value: Any) -> Any:
    """Return a `tile_numbers` function in which the number `name` is replaced by `value(shape, tile, right)`."""
    return lambda shape, tile: tile_numbers(shape, tile) | {name: value(shape, tile, tile_numbers(shape, tile))}


_ROUND_UP = "output tiles are rounded up at the border"
_PADDED = "waste is the share of the padded work that is not in the problem"
_BLOCKS = "one tile's float32 blocks of a, b and c"

EXERCISES = (
    Exercise(
        "slowdown",
        "how much slower the best of the top k is",
        differential(
            slowdown,
            _slowdown_cases,
            "the best measured runtime among the k lowest scores, over the best of all, minus 1",
        ),
    ),
    Exercise(
        "ordered_pairs",
        "the share of pairs that are ordered rightly",
        differential(ordered_pairs, _pair_cases, _BOTH),
    ),
    Exercise(
        "tile_numbers",
        "numbers a tile has without being run",
        differential(
            tile_numbers,
            lambda: [
                Example((shape, tile), about)
                for shape, tile, about in (
                    ((197, 768, 64), (32, 64, 48), "where tiles reach over the border"),
                    ((512, 512, 512), (64, 128, 32), "where tiles divide the problem"),
                    ((1, 10, 7), (8, 16, 16), "where the problem is smaller than a tile"),
                    ((100, 30, 90), (48, 8, 16), "where tiles reach over the border"),
                )
            ],
            f"{_ROUND_UP}; {_PADDED}; bytes are of {_BLOCKS}",
        ),
    ),
)
