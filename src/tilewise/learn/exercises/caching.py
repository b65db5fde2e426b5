"""Checks of the caching lesson: attention of one query, a cache that is written in place, and what it saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise.learn.checking import Exercise, Wrong, require
from tilewise.learn.differential import Example, Mistakes, differential


def attend(query: Any, keys: Any, values: Any) -> Any:
    return _attend(query, keys, values, lambda scores: np.exp(scores - np.logaddexp.reduce(scores)))


def _attend(query: Any, keys: Any, values: Any, weigh: Any) -> Any:
    return weigh(keys @ query / len(query) ** 0.5) @ values


def _attend_cases() -> list[Example]:
    """Return test inputs for `attend`, with a remark on what is special about each."""
    rng = np.random.default_rng(0)
    cases = []
    for length, width, size in ((5, 8, 1.0), (1, 4, 1.0), (6, 6, 1.0), (7, 3, 40.0), (4, 16, 1000.0), (3, 8, 1e5)):
        query, keys, values = size * rng.standard_normal(width), *rng.standard_normal((2, length, width))
        if size == 1e5:
            keys = -np.abs(keys) * np.sign(query)  # all scores are far below zero
        about = "for one key" if length == 1 else "for large scores: subtract the largest before exp, or it overflows"
        cases.append(Example((query, keys, values), about if length == 1 or size > 1 else ""))
    return cases


def _draw_attend(rng: np.random.Generator) -> tuple[Any, Any, Any]:
    length, width = rng.integers(1, 10, 2)
    query, keys, values = rng.standard_normal(width), *rng.standard_normal((2, length, width))
    return 10 ** rng.uniform(-1, 4) * query, keys, values


_BEFORE = "subtract the largest score before exp, or it overflows"


def _store(answer: Callable[..., Any]) -> None:
    """Check the exercise `store`: what it writes, what it leaves unchanged, and that it returns views."""
    rng = np.random.default_rng(1)
    keys, values = rng.standard_normal((2, 6, 4))  # what an earlier text left there
    other_keys, other_values = rng.standard_normal((2, 9, 4)).astype(np.float32)
    # After an earlier position, such as that of another text with the same beginning, and in other arrays.
    calls = [(keys, values, position) for position in (0, 1, 2, 3, 4, 2, 5)] + [(other_keys, other_values, 3)]
    for keys, values, position in calls:
        before, written = (keys.copy(), values.copy()), rng.standard_normal((2, 4)).astype(keys.dtype)
        result = answer(keys, values, *written.copy(), position)
        call = f"store at position {position}"
        two_arrays = isinstance(result, tuple | list) and len(result) == 2
        require(
            two_arrays and all(isinstance(r, np.ndarray) for r in result),
            f"{call} must give the keys and values so far, two arrays",
        )
        for name, index, mine, whole, old in zip(
            ("keys", "values"), range(2), result, (keys, values), before, strict=True
        ):
            _check_stored(call, name, (mine, whole, old), written[index], written[1 - index], position)


def _check_stored(call: str, name: str, arrays: tuple[Any, Any, Any], written: Any, other: Any, position: int) -> None:
    """Check one of the two arrays: the position written, all others, and the view returned."""
    mine, whole, old = arrays
    row = whole[position]
    if np.array_equal(whole, old) and not np.array_equal(row, written) and mine.shape == (position + 1, 4):
        raise Wrong(f"{call} left {name} as it was and gave a copy: write in place, and give a view of {name}")
    if not np.array_equal(row, written):
        reason = "at this position, over what is there"
        changed = np.flatnonzero((whole != old).any(axis=1))
        if np.array_equal(row, other):
            reason = "the two are exchanged"
        elif np.allclose(row, old[position] + written):
            reason = "over what is there, not added to it"
        elif changed.tolist() == [position]:
            reason = "as they are"
        elif len(changed):
            reason = f"at this position, and it is written at {changed.tolist()}"
        write = "write the key into keys and the value into values"
        raise Wrong(f"{call} left {np.round(row, 3).tolist()} in {name}: {write}, {reason}")
    others = np.delete(np.arange(len(whole)), position)
    require(
        np.array_equal(whole[others], old[others]),
        f"{call} left other rows of {name} changed: write at this position only, and no more",
    )
    advice = f"{name} first to last up to and with this position, and no more"
    require(
        mine.shape == (position + 1, 4),
        f"{call} gave {name} of the shape {mine.shape}, and {(position + 1, 4)} is right: {advice}",
    )
    require(not np.array_equal(mine[-1], other), f"{call} gave values where keys are due: keys first, then values")
    require(
        np.shares_memory(mine, whole) and mine.dtype == whole.dtype,
        f"{call} gave a copy of {name} ({mine.dtype}): a view costs nothing, a copy grows with the length",
    )
    require(np.array_equal(mine, whole[: position + 1]), f"{call} gave other rows of {name}: {advice}")


def tokens_computed(prompt: int, new: int, cached: bool) -> int:
    if not new:
        return 0
    return prompt + new - 1 if cached else sum(prompt + i for i in range(new))


MISTAKES: dict[str, Mistakes] = {
    "attend": [
        (
            "the weights do not add up to 1: divide them by their sum",
            lambda query, keys, values: _attend(query, keys, values, lambda s: np.exp(s - s.max())),
        ),
        (
            "the last key is left out",
            lambda query, keys, values: attend(query, keys[:-1], values[:-1]) if len(keys) > 1 else values[0],
        ),
        ("the sign of the scores is the wrong way round", lambda query, keys, values: attend(-query, keys, values)),
    ],
    "tokens_computed": [
        (
            "to generate nothing, nothing goes through the model",
            lambda prompt, new, cached: prompt + new - 1 if cached else tokens_computed(prompt, new, False),
        ),
        (
            "the prompt goes through the model too",
            lambda prompt, new, cached: new if cached else tokens_computed(prompt, new, False),
        ),
        (
            "without a cache every pass is one token longer than the last",
            lambda prompt, new, cached: tokens_computed(prompt, new, True) if cached else (prompt + new) * new,
        ),
    ],
}

EXERCISES = (
    Exercise(
        "attend",
        "attention of one new query over the cached keys and values",
        differential(
            attend,
            _attend_cases,
            _draw_attend,
            f"the softmax of the scores / sqrt(width), weights that add up to 1, times the values; {_BEFORE}",
            tolerance=1e-4,
            mistakes=MISTAKES["attend"],
        ),
    ),
    Exercise("store", "a new key and value, written in place", _store),
    Exercise(
        "tokens_computed",
        "how many positions go through the model",
        differential(
            tokens_computed,
            lambda: [
                Example((prompt, new), "" if new else "where nothing is generated", {"cached": cached})
                for prompt, new in ((10, 5), (1, 1), (64, 1000), (7, 2), (3, 0))
                for cached in (True, False)
            ],
            lambda rng: (int(rng.integers(1, 50)), int(rng.integers(0, 50)), bool(rng.integers(2))),
            "the first new token comes out of the prompt's pass, and each further one out of a pass over everything so "
            "far, or over what the cache does not hold",
            mistakes=MISTAKES["tokens_computed"],
        ),
    ),
)
