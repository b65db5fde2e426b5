"""Checks of the cost-model lesson: what a ranking is worth, how it orders pairs, numbers a tile has by itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tilewise.costmodel.metrics import opa, top_k_error
from tilewise.learn.checking import Exercise
from tilewise.learn.differential import Example, Mistakes, differential


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


def _draw_ranking(rng: np.random.Generator) -> tuple[Any, Any, int]:
    count = int(rng.integers(1, 30))
    return 1e-6 * rng.lognormal(size=count), rng.standard_normal(count), int(rng.integers(1, count + 4))


def _of_best(choose: Any, runtimes: Any, scores: Any, k: int) -> Any:
    """Compute `slowdown` with another choice among the k best: a common mistake."""
    return choose(runtimes[np.argsort(scores)[:k]]) / runtimes.min() - 1


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


def _draw_pairs(rng: np.random.Generator) -> tuple[Any, Any]:
    count = rng.integers(1, 12)
    return np.append(rng.integers(1, 6, count), 6.0), rng.integers(0, 6, count + 1) / 2


def _accepting_equal(runtimes: Any, scores: Any) -> float:
    """Count pairs of equal scores as ordered: a common mistake."""
    slower = np.less.outer(runtimes, runtimes)
    return float(np.less_equal.outer(scores, scores)[slower].mean())


_BOTH = "of all pairs with different runtimes, the share whose scores are ordered the same way"


def tile_numbers(shape: Any, tile: Any) -> dict[str, float]:
    counts = [-(-size // step) for size, step in zip(shape, tile, strict=True)]
    padded = math.prod(number * step for number, step in zip(counts, tile, strict=True))
    m, n, k = tile
    tiles, waste = counts[0] * counts[1], 1 - math.prod(shape) / padded
    return {"tiles": tiles, "waste": waste, "bytes": 4 * (m * k + k * n + m * n)}


MISTAKES: dict[str, Mistakes] = {
    "slowdown": [
        ("the shortest runtimes are not known before: take the k lowest scores", lambda runtimes, scores, k: 0.0),
        (
            "the best of the k decides, not their median",
            lambda runtimes, scores, k: _of_best(np.median, runtimes, scores, k),
        ),
        ("the best of the k decides, not the worst", lambda runtimes, scores, k: _of_best(np.max, runtimes, scores, k)),
        ("k configurations are tried, not one", lambda runtimes, scores, k: slowdown(runtimes, scores, 1)),
        ("that is one configuration too many", lambda runtimes, scores, k: slowdown(runtimes, scores, k + 1)),
        (
            "that is a difference, not a share",
            lambda runtimes, scores, k: slowdown(runtimes, scores, k) * runtimes.min(),
        ),
        ("0.05 is 5 %: give a share, not percent", lambda runtimes, scores, k: 100 * slowdown(runtimes, scores, k)),
    ],
    "ordered_pairs": [
        ("equal scores are not in the right order", _accepting_equal),
    ],
    "tile_numbers": [
        (
            "k is padded to whole tiles too",
            lambda shape, tile: (
                tile_numbers(shape, tile) | {"waste": tile_numbers((*shape[:2], 1), (*tile[:2], 1))["waste"]}
            ),
        ),
        (
            "divide by the padded work, not by the problem",
            lambda shape, tile: tile_numbers(shape, tile) | {"waste": 1 / (1 - tile_numbers(shape, tile)["waste"]) - 1},
        ),
    ],
}

EXERCISES = (
    Exercise(
        "slowdown",
        "how much slower the best of the top k is",
        differential(
            slowdown,
            _slowdown_cases,
            _draw_ranking,
            "the best measured runtime among the k lowest scores, over the best of all, minus 1",
            mistakes=MISTAKES["slowdown"],
        ),
    ),
    Exercise(
        "ordered_pairs",
        "the share of pairs that are ordered rightly",
        differential(ordered_pairs, _pair_cases, _draw_pairs, _BOTH, mistakes=MISTAKES["ordered_pairs"]),
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
            lambda rng: tuple(tuple(rng.integers(1, most, 3).tolist()) for most in (300, 70)),
            {
                "tiles": "tiles are cut from the output, along m and n but not along k, and rounded up at the border",
                "waste": "waste is the share of the padded work that is not in the problem",
                "bytes": "one tile's float32 blocks of a, b and c",
            },
            mistakes=MISTAKES["tile_numbers"],
        ),
    ),
)
