"""Checks of the pruning lesson: which weights go, a pattern hardware likes, and removing what nobody reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise.learn.checking import Exercise, require, same_array


def _mask(answer: Callable[..., Any]) -> None:
    """Check the exercise `magnitude_mask`."""
    rng = np.random.default_rng(0)
    for shape, sparsity in (
        ((7, 9), 0.7),
        ((4, 5), 0.5),
        ((10,), 0.0),
        ((3, 4, 3, 3), 0.9),
        ((6, 6), 0.34),
        ((3, 5), 0.65),
    ):
        weights = rng.standard_normal(shape) if shape != (4, 5) else rng.integers(-2, 3, shape) / 2  # equal ones
        call = f"magnitude_mask of {shape} at {sparsity}"
        mask = np.asarray(answer(weights, sparsity))
        require(mask.shape == shape and mask.dtype == bool, f"{call} must be an array of bool with the weights' shape")
        removed_count, expected_count = int((~mask).sum()), round(sparsity * weights.size)
        inverted = removed_count == weights.size - expected_count != expected_count > 0
        exactly = "remove exactly round(sparsity * size) of all weights, also if many are equal or sparsity is 0"
        advice = "True is for the weights that stay" if inverted else exactly
        require(
            removed_count == expected_count,
            f"{call} takes {removed_count} of {weights.size} weights, and {expected_count} were asked for: {advice}",
        )
        if 0 < removed_count < weights.size:
            keeps_largest = np.abs(weights[mask]).min() >= np.abs(weights[~mask]).max()
            require(
                bool(keeps_largest),
                f"{call} keeps a smaller weight than one it takes: compare magnitudes, not values, of all weights",
            )


def _two_of_four(answer: Callable[..., Any]) -> None:
    """Check the exercise `two_of_four`."""
    rng = np.random.default_rng(1)
    for shape in ((3, 8), (1, 4), (5, 16)):
        weights = rng.standard_normal(shape)
        groups = np.abs(weights).reshape(-1, 4)
        right = np.zeros(groups.shape)
        np.put_along_axis(right, np.argsort(-groups, axis=1)[:, :2], 1, axis=1)
        hint = "in each run of four neighbours in a row, the two of largest magnitude stay"
        before = weights.copy()
        mask = right.reshape(shape)
        mistakes = (
            (mask, "give the weights, not the mask"),
            (before**2 * mask, "give the weights, not their squares"),
            (before * (1 - mask), "the two largest stay, the two smallest become zero"),
            (before * _largest_two(before), "compare magnitudes, not values"),
        )
        result = np.asarray(answer(weights), float)
        same_array(result, before * mask, f"two_of_four of {shape}", hint, mistakes=mistakes)
        require(np.array_equal(weights, before), "the caller's weights came back changed: work on a copy")
    result = np.asarray(answer(np.array([[1.0, -1.0, 1.0, 1.0]])))
    advice = "exactly two of every four stay, also if magnitudes are equal"
    require(int((result != 0).sum()) == 2, f"two_of_four of [1, -1, 1, 1] gave {result.tolist()}: {advice}")


def _largest_two(weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Mask the two largest values (not magnitudes) of every four neighbours: a common mistake."""
    groups = weights.reshape(-1, 4)
    mask = np.zeros(groups.shape)
    np.put_along_axis(mask, np.argsort(-groups, axis=1)[:, :2], 1, axis=1)
    return mask.reshape(weights.shape)


def _remove_units(answer: Callable[..., Any]) -> None:
    """Check the exercise `remove_units`."""
    rng = np.random.default_rng(2)
    for inputs, hidden, outputs, units in ((4, 6, 3, [0, 2, 5]), (5, 8, 2, [7]), (3, 4, 4, [0, 1, 2, 3])):
        w1, b1 = rng.standard_normal((hidden, inputs)), rng.standard_normal(hidden)
        w2, x = rng.standard_normal((outputs, hidden)), rng.standard_normal((10, inputs))
        masked = np.maximum(x @ w1.T + b1, 0) * np.isin(np.arange(hidden), units)
        small = answer(w1, b1, w2, units)
        call = f"remove_units of {hidden} units keeping {units}"
        require(len(small) == 3, f"{call} must give w1, b1 and w2")
        shapes = [np.shape(array) for array in small]
        want = [(len(units), inputs), (len(units),), (outputs, len(units))]
        require(shapes == want, f"{call} gave the shapes {shapes}, and {want} is right: {_UNIT}")
        s1, c1, s2 = small
        result = np.maximum(x @ s1.T + c1, 0) @ s2.T
        same_array(result, masked @ w2.T, call, f"{_UNIT}, and the kept ones do not change")


_UNIT = "a unit is a row of w1, an element of b1 and a column of w2: remove all three of each unit that is not in kept"


EXERCISES = (
    Exercise("magnitude_mask", "which weights stay at a given sparsity", _mask),
    Exercise("two_of_four", "the 2:4 pattern", _two_of_four),
    Exercise("remove_units", "a smaller network that answers as the masked one", _remove_units),
)
