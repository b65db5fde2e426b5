"""Checks of the cost-model lesson: what a ranking is worth, how it orders pairs, numbers a tile has by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise.costmodel.metrics import opa, top_k_error
from tilewise.learn.checking import Exercise, require, same_number


def _slowdown(answer: Callable[..., Any]) -> None:
    """Check the exercise `slowdown`."""
    rng = np.random.default_rng(0)
    for count, k in ((1, 1), (5, 1), (30, 5), (4, 10)):
        runtimes, scores = rng.uniform(1, 9, count), rng.standard_normal(count)
        call = f"slowdown of the top {k} of {count}"
        hint = "the best measured runtime among the k lowest scores, over the best of all, minus 1"
        error = top_k_error(runtimes, scores, k)
        by_score = np.argsort(scores)
        mistakes = (
            (error + 1, "a slowdown of nothing is 0: take 1 away"),
            (runtimes[by_score[-k:]].min() / runtimes.min() - 1, "the lowest scores are the most promising"),
            (runtimes[by_score[:k]].mean() / runtimes.min() - 1, "the best of the k decides, not their mean"),
        )
        same_number(answer(runtimes, scores, k), error, call, hint, mistakes=mistakes)


def _pairs(answer: Callable[..., Any]) -> None:
    """Check the exercise `ordered_pairs`."""
    rng = np.random.default_rng(1)
    for count in (25, 6, 2):
        runtimes, scores = rng.permutation(count).astype(float), rng.standard_normal(count)
        hint = "of all pairs with different runtimes, the share whose scores are ordered the same way"
        share = opa(runtimes, scores)
        mistakes = ((1 - share, "low scores belong to short runtimes: the orders must agree"),)
        same_number(answer(runtimes, scores), share, f"ordered_pairs of {count}", hint, mistakes=mistakes)
    value = answer(np.array([1.0, 1.0, 2.0]), np.array([0.3, 0.1, 0.9]))
    hint = "a pair of equal runtimes has no right order, so leave it out"
    same_number(value, 1.0, "ordered_pairs with two equal runtimes", hint)
    value = answer(np.array([1.0, 2.0, 3.0]), np.array([0.3, 0.3, 0.9]))
    hint = "a pair of equal scores counts as a pair, but is not in the right order"
    same_number(value, 2 / 3, "ordered_pairs with two equal scores", hint)


def _tile_numbers(answer: Callable[..., Any]) -> None:
    """Check the exercise `tile_numbers`."""
    for shape, tile in (((512, 512, 512), (64, 128, 32)), ((197, 768, 64), (32, 64, 64)), ((1, 10, 7), (8, 16, 16))):
        numbers = answer(shape, tile)
        counts = [-(-size // step) for size, step in zip(shape, tile, strict=True)]
        padded = int(np.prod([count * step for count, step in zip(counts, tile, strict=True)]))
        m, n, k = tile
        right = {
            "tiles": counts[0] * counts[1],
            "waste": 1 - float(np.prod(shape)) / padded,
            "bytes": 4 * (m * k + k * n + m * n),
        }
        hints = {
            "tiles": "output tiles, rounded up at the border",
            "waste": "the share of the padded work that is not in the problem",
            "bytes": "one tile's float32 blocks of a, b and c",
        }
        require(
            isinstance(numbers, dict) and set(numbers) == set(right),
            f"tile_numbers must give a dict with {sorted(right)}",
        )
        without_k = 1 - shape[0] * shape[1] / (counts[0] * counts[1] * m * n)
        mistakes = {
            "tiles": ((int(np.prod(counts)), "output tiles, however many steps of k each takes"),),
            "waste": ((without_k, "k is padded to whole tiles too"),),
        }
        for name, value in right.items():
            call = f"tile_numbers({shape}, {tile})[{name!r}]"
            same_number(numbers[name], value, call, hints[name], mistakes=mistakes.get(name, ()))


EXERCISES = (
    Exercise("slowdown", "how much slower the best of the top k is", _slowdown),
    Exercise("ordered_pairs", "the share of pairs that are ordered rightly", _pairs),
    Exercise("tile_numbers", "numbers a tile has without being run", _tile_numbers),
)
