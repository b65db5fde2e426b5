"""Checks of the caching lesson: attention of one query, a cache that is written in place, and what it saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise.learn.checking import Exercise, require, same_array, same_number


def _attend(answer: Callable[..., Any]) -> None:
    """Check the exercise `attend`."""
    rng = np.random.default_rng(0)
    for length, width, size in ((1, 4, 1.0), (5, 8, 1.0), (7, 3, 40.0), (4, 16, 1000.0), (3, 8, 1e5)):
        query, keys, values = size * rng.standard_normal(width), *rng.standard_normal((2, length, width))
        if size == 1e5:
            keys = -np.abs(keys) * np.sign(query)  # all scores are far below zero
        scores = keys @ query / np.sqrt(width)
        weights = np.exp(scores - scores.max())
        right = weights / weights.sum() @ values
        hint = (
            "the softmax of the scores / sqrt(width), times the values; subtract the largest score before exp, "
            "or it overflows"
        )
        largest = np.exp(scores - scores.max())
        mistakes = (
            (weights @ values, "divide the weights by their sum, so that they add up to 1"),
            (largest / largest.sum() @ keys, "the weights multiply the values, not the keys"),
        )
        call = f"attend to {length} keys of width {width}"
        same_array(answer(query, keys, values), right, call, hint, mistakes=mistakes)


def _store(answer: Callable[..., Any]) -> None:
    """Check the exercise `store`."""
    rng = np.random.default_rng(1)
    keys, values = rng.standard_normal((2, 6, 4))  # what an earlier text left there
    written = rng.standard_normal((2, 5, 4))
    for position in range(5):
        result = answer(keys, values, written[0, position], written[1, position], position)
        call = f"store at position {position}"
        require(isinstance(result, tuple) and len(result) == 2, f"{call} must give the keys and values so far")
        for mine, all_written, whole in zip(result, written, (keys, values), strict=True):
            written_there = np.array_equal(whole[position], all_written[position])
            advice = "keys first, up to and with this position, and no more" if written_there else _WRITE
            same_array(mine, all_written[: position + 1], call, advice)
            require(
                np.shares_memory(mine, whole), f"{call} gave a copy: a view costs nothing, a copy grows with length"
            )
            require(written_there, f"{call} left {whole[position]} there: {_WRITE}")


_WRITE = "write the key into keys and the value into values, at this position, over what is there"


def _projections(answer: Callable[..., Any]) -> None:
    """Check the exercise `tokens_computed`."""
    for prompt, new in ((10, 5), (1, 1), (64, 1000), (3, 0)):
        with_cache = prompt + max(new - 1, 0)
        without = sum(prompt + i for i in range(new))
        for cached, right in ((True, with_cache if new else 0), (False, without)):
            call = f"tokens_computed({prompt}, {new}, cached={cached})"
            hint = (
                "the first new token comes out of the prompt's pass, and each further one out of a pass over "
                "everything so far, or over what the cache does not hold"
                if new
                else "to generate nothing, nothing goes through the model"
            )
            mistakes = new * (
                (prompt + new, "the last token is not fed back, so it needs no pass"),
                (new, "the prompt goes through the model too"),
                (prompt * new, "without a cache every pass is one token longer than the last"),
                ((prompt + new) * new, "without a cache every pass is one token longer than the last"),
                (without - prompt * new, "the prompt goes through the model in every pass"),
                (without if cached else with_cache, "a cache makes it fewer, not more"),
            )
            same_number(answer(prompt, new, cached=cached), right, call, hint, mistakes=mistakes)


EXERCISES = (
    Exercise("attend", "attention of one new query over the cached keys and values", _attend),
    Exercise("store", "a new key and value, written in place", _store),
    Exercise("tokens_computed", "how many positions go through the model", _projections),
)
