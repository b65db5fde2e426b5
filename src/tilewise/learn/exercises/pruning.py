"""Checks of the pruning lesson: which weights go, a pattern hardware likes, and removing what nobody reads."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.learn.checking import Exercise
from tilewise.learn.differential import Example, Mistakes, differential


def magnitude_mask(weights: Any, sparsity: float) -> Any:
    mask = np.ones(weights.size, bool)
    mask[np.argsort(np.abs(weights), axis=None, kind="stable")[: round(sparsity * weights.size)]] = False
    return mask.reshape(weights.shape)


def _mask_fault(mask: Any, right: Any, weights: Any, sparsity: float) -> str:
    """Return what is wrong with a mask, or ""; which of several equal weights goes does not matter."""
    if mask.shape != weights.shape or mask.dtype != bool:
        return f"gave {mask.dtype} of the shape {mask.shape}: it must be an array of bool with the weights' shape; "
    count, expected = int((~mask).sum()), round(sparsity * weights.size)
    if count != expected:
        return f"takes {count} of {weights.size} weights, and {expected} were asked for: "
    if 0 < count < weights.size and np.abs(weights[mask]).min() < np.abs(weights[~mask]).max():
        return "keeps a smaller weight than one it takes: "
    return ""


def _mask_cases() -> list[Example]:
    """Return test inputs for `magnitude_mask`, with a remark on what is special about each."""
    rng = np.random.default_rng(0)
    settings = (
        ((7, 9), 0.7, ""),
        ((10,), 0.0, "where sparsity is 0"),
        ((3, 4, 3, 3), 0.9, "for weights of a convolution"),
        ((6, 6), 0.34, ""),
        ((3, 5), 0.65, ""),
        ((8,), 1.0, "where sparsity is 1"),
        ((4, 5), 0.5, "where magnitudes are equal"),
    )
    return [
        Example((rng.standard_normal(shape) if shape != (4, 5) else rng.integers(-2, 3, shape) / 2, sparsity), about)
        for shape, sparsity, about in settings
    ]


def _draw_weights(rng: np.random.Generator, shape: Any) -> Any:
    """Draw weights in float32 or float64, or some with equal magnitudes."""
    weights = rng.standard_normal(shape).astype(rng.choice(("float32", "float64")))
    return weights if rng.random() < 0.7 else np.round(weights) / 2


def _draw_mask(rng: np.random.Generator) -> tuple[Any, float]:
    return _draw_weights(rng, rng.integers(1, 7, rng.integers(1, 5))), float(rng.beta(0.5, 0.5))


_EXACTLY = "remove exactly round(sparsity * size) of all weights, also if many are equal or sparsity is 0"
_MAGNITUDES = "compare magnitudes, not values, of all weights"


def two_of_four(weights: Any) -> Any:
    groups = weights.reshape(-1, 4).copy()
    np.put_along_axis(groups, np.argsort(np.abs(groups), axis=1)[:, :2], 0, axis=1)
    return groups.reshape(weights.shape)


def _two_fault(result: Any, right: Any, weights: Any) -> str:
    """Return what is wrong with 2:4-pruned weights, or ""; which of several equal magnitudes stays does not matter."""
    if result.shape != right.shape:
        return f"gave the shape {result.shape}, and {right.shape} is right: "
    ours, theirs = (np.sort(np.abs(array).reshape(-1, 4), axis=1) for array in (right, np.asarray(result, float)))
    if not np.allclose(ours, theirs, rtol=1e-5) or not np.all((result == weights) | (result == 0)):
        groups = result.reshape(-1, 4), weights.reshape(-1, 4)
        wrong = ~np.isclose(ours, theirs).all(1) | ~((groups[0] == groups[1]) | (groups[0] == 0)).all(1)
        at = int(np.flatnonzero(wrong)[0])
        return f"gave {groups[0][at].tolist()} for {groups[1][at].tolist()}: "
    return ""


def _two_cases() -> list[Example]:
    """Return test inputs for `two_of_four`, with a remark on what is special about each."""
    rng = np.random.default_rng(1)
    cases = [Example((rng.standard_normal(shape),), "") for shape in ((3, 8), (1, 4), (4, 4), (5, 16))]
    equal = np.array([[1.0, -1.0, 1.0, 1.0], [0.5, 0.5, 0.0, 0.0]])
    return [*cases, Example((equal,), "where magnitudes are equal: exactly two of every four stay")]


def _above_threshold(weights: Any) -> Any:
    groups = weights.reshape(-1, 4)
    second = np.sort(np.abs(groups), axis=1)[:, [2]]
    return np.where(np.abs(groups) >= second, groups, 0).reshape(weights.shape)


_LARGEST = "in each run of four neighbours in a row, the two of largest magnitude stay, at their places"


def remove_units(w1: Any, b1: Any, w2: Any, kept: Any) -> tuple[Any, Any, Any]:
    return w1[kept], b1[kept], w2[:, kept]


_UNIT = "a unit is a row of w1, an element of b1 and a column of w2: remove all three of each unit that is not in kept"


def _units_fault(small: Any, right: Any, w1: Any, *_: Any) -> str:
    """Return what is wrong with a smaller network, or ""; the order of its units does not matter."""
    for name, mine, expected in zip(("w1", "b1", "w2"), small, right, strict=True):
        if mine.shape != expected.shape:
            return f"gave {name} of the shape {mine.shape}, and {expected.shape} is right: "
    x = np.random.default_rng(3).standard_normal((10, w1.shape[1]))
    result, masked = (np.maximum(x @ a.T + b, 0) @ c.T for a, b, c in (small, right))
    return (
        ""
        if np.allclose(result, masked, rtol=1e-4, atol=1e-6)
        else "answers otherwise than the network with kept units only: "
    )


def _network(rng: np.random.Generator, inputs: int, hidden: int, outputs: int, units: list[int]) -> tuple[Any, ...]:
    w1, b1 = rng.standard_normal((hidden, inputs)), rng.standard_normal(hidden)
    return w1, b1, rng.standard_normal((outputs, hidden)), units


def _draw_units(rng: np.random.Generator) -> tuple[Any, ...]:
    inputs, hidden, outputs = map(int, rng.integers(1, 8, 3))
    return _network(rng, inputs, hidden, outputs, rng.permutation(hidden)[: rng.integers(1, hidden + 1)].tolist())


def _unit_cases() -> list[Example]:
    """Return test inputs for `remove_units`, with a remark on what is special about each."""
    rng = np.random.default_rng(2)
    sizes = ((4, 6, 3, [0, 2, 5]), (5, 8, 2, [7]), (6, 6, 6, [4, 1, 0]), (3, 4, 4, [0, 1, 2, 3]))
    return [
        Example(
            _network(rng, inputs, hidden, outputs, units),
            "where all sizes are equal and kept is not in order"
            if inputs == outputs == hidden
            else "where all units are kept"
            if len(units) == hidden
            else "",
        )
        for inputs, hidden, outputs, units in sizes
    ]


def _zeroed(w1: Any, b1: Any, w2: Any, units: Any) -> Any:
    mask = np.isin(np.arange(len(b1)), units)
    return w1 * mask[:, None], b1 * mask, w2 * mask


_CHANGE = f"{_UNIT}, and the kept ones change neither their numbers nor their order"


MISTAKES: dict[str, Mistakes] = {
    "magnitude_mask": [
        ("True is for the weights that stay", lambda weights, sparsity: ~magnitude_mask(weights, sparsity)),
        (
            "a threshold keeps or takes all equal ones",
            lambda weights, sparsity: np.abs(weights) > np.quantile(np.abs(weights), sparsity),
        ),
        (
            "a threshold keeps or takes all equal ones",
            lambda weights, sparsity: np.abs(weights) >= np.quantile(np.abs(weights), sparsity),
        ),
    ],
    "two_of_four": [
        ("give the weights, not the mask", lambda weights: (two_of_four(weights) != 0).astype(float)),
        ("give the weights, not their squares", lambda weights: two_of_four(weights) ** 2),
        ("not half of the whole matrix", lambda weights: weights * magnitude_mask(weights, 0.5)),
        ("a threshold keeps or takes all equal ones", _above_threshold),
    ],
    "remove_units": [
        (
            "these are the units that are not in kept",
            lambda w1, b1, w2, units: remove_units(w1, b1, w2, np.setdiff1d(range(len(b1)), units)),
        ),
        (
            "kept says which units stay, not how many",
            lambda w1, b1, w2, units: remove_units(w1, b1, w2, range(len(units))),
        ),
        ("setting to zero makes nothing smaller", _zeroed),
        ("do not scale", lambda w1, b1, w2, units: (w1[units], b1[units], w2[:, units] * len(b1) / len(units))),
        (
            "the first unit is unit 0: kept counts from 0",
            lambda w1, b1, w2, units: remove_units(w1, b1, w2, [unit - 1 for unit in units]),
        ),
        (
            "the order of units must be the same in w1, b1 and w2",
            lambda w1, b1, w2, units: (w1[sorted(units)], b1[sorted(units)], w2[:, units]),
        ),
    ],
}

EXERCISES = (
    Exercise(
        "magnitude_mask",
        "which weights stay at a given sparsity",
        differential(
            magnitude_mask,
            _mask_cases,
            _draw_mask,
            f"{_EXACTLY}; {_MAGNITUDES}",
            fault=_mask_fault,
            mistakes=MISTAKES["magnitude_mask"],
        ),
    ),
    Exercise(
        "two_of_four",
        "the 2:4 pattern",
        differential(
            two_of_four,
            _two_cases,
            lambda rng: (_draw_weights(rng, rng.integers(1, 6, 2) * (1, 4)),),
            _LARGEST,
            fault=_two_fault,
            mistakes=MISTAKES["two_of_four"],
        ),
    ),
    Exercise(
        "remove_units",
        "a smaller network that answers as the masked one",
        differential(
            remove_units, _unit_cases, _draw_units, _CHANGE, fault=_units_fault, mistakes=MISTAKES["remove_units"]
        ),
    ),
)
