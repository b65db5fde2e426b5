"""Checks of the caching lesson: attention of one query, a cache that is written in place, and what it saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise.learn.asking import require, same_array, same_number
from tilewise.learn.checking import Exercise


def _attend(answer: Callable[..., Any]) -> None:
    """Check the exercise `attend`."""
    rng = np.random.default_rng(0)
    for length, width, size in ((1, 4, 1.0), (5, 8, 1.0), (7, 3, 40.0), (4, 16, 1000.0)):
        query, keys, values = size * rng.standard_normal(width), rng.standard_normal((length, width)), None
        values = rng.standard_normal((length, width))
        scores = keys @ query / np.sqrt(width)
        weights = np.exp(scores - scores.max())
        right = weights / weights.sum() @ values
        hint = "divide the scores by sqrt(width) and take their largest away before exp, or it overflows"
        same_array(answer(query, keys, values), right, f"attend to {length} keys of width {width}", hint)


def _store(answer: Callable[..., Any]) -> None:
    """Check the exercise `store`."""
    keys, values = np.zeros((6, 4)), np.zeros((6, 4))
    rng = np.random.default_rng(1)
    written = rng.standard_normal((2, 5, 4))
    for position in range(5):
        result = answer(keys, values, written[0, position], written[1, position], position)
        call = f"store at position {position}"
        require(isinstance(result, tuple) and len(result) == 2, f"{call} must give the keys and values so far")
        for mine, all_written, whole in zip(result, written, (keys, values), strict=True):
            same_array(mine, all_written[: position + 1], call, "give everything up to this position, and no more")
            require(
                np.shares_memory(mine, whole), f"{call} gave a copy: a view costs nothing, a copy grows with length"
            )


def _projections(answer: Callable[..., Any]) -> None:
    """Check the exercise `tokens_computed`."""
    for prompt, new in ((1, 1), (10, 5), (64, 1000), (3, 0)):
        with_cache = prompt + max(new - 1, 0)
        without = sum(prompt + i for i in range(new))
        for cached, right in ((True, with_cache if new else 0), (False, without)):
            call = f"tokens_computed({prompt}, {new}, cached={cached})"
            hint = "each new token comes out of one pass: over everything so far, or over what the cache does not hold"
            same_number(answer(prompt, new, cached=cached), right, call, hint)


EXERCISES = (
    Exercise("attend", "attention of one new query over the cached keys and values", _attend),
    Exercise("store", "a new key and value, written in place", _store),
    Exercise("tokens_computed", "how many positions go through the model", _projections),
)
