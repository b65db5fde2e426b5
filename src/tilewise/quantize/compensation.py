"""Rounding a matrix column by column, where the columns still to be rounded make up for the error of those before them.

What counts is not how far a weight is off but how far the layer's results are: the second moments of its inputs tell
which columns can stand in for which (the method known as GPTQ). What a rounded number may be is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_DAMPING = 0.01  # of the mean moment, added to each


def inverse_factor(moments: Array, width: int) -> Array:
    """The upper Cholesky factor of the inverse of the damped second moments: row i tells how the error of column i is
    made up for by the columns after it."""
    full = np.eye(width)
    mean = float(np.diag(moments).mean())
    full *= mean if mean > 0 else 1.0  # padding and dead inputs
    full[: len(moments), : len(moments)] = moments
    full[np.diag_indices(width)] += _DAMPING * (mean if mean > 0 else 1.0)
    lower = np.linalg.inv(np.linalg.cholesky(full))
    upper: Array = np.linalg.cholesky(lower.T @ lower).T
    return upper.astype(np.float32)


def round_columns(
    weight: Array,
    upper: Array,
    round_column: Callable[[int, Array], Array],
    together: int = 32,
    begin: Callable[[int, Array, Array], None] | None = None,
) -> None:
    """Every column of `weight` (O, K) through `round_column(index, column)`, which gives what it is rounded to; what
    that is off by is handed on: to the other columns of a block one by one, to those behind it `together`.
    `begin(first, block, importance)` is shown every block before it is rounded."""
    weight = weight.copy()
    for first in range(0, weight.shape[1], together):
        part = slice(first, first + together)
        block, inner = weight[:, part], upper[part, part]
        if begin is not None:
            begin(first, block, 1 / np.square(np.diag(inner)))
        errors = np.empty_like(block)
        for i in range(block.shape[1]):
            column = block[:, i]
            errors[:, i] = (column - round_column(first + i, column)) / inner[i, i]
            block[:, i + 1 :] -= errors[:, i : i + 1] * inner[i, i + 1 :]
        weight[:, first + together :] -= errors @ upper[part, first + together :]
