"""GPTQ: error-compensating rounding (Frantar et al. 2022).

A matrix is rounded column by column, and the columns that are not rounded yet are adjusted to compensate for the
error of those that are. The error that counts is that of the layer's results, so the second moments of its inputs
decide how much a column can compensate for another. The caller chooses the grid of rounded values.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilewise.tensor import Array

_DAMPING = 0.01  # added to the diagonal, as a share of its mean (GPTQ's percdamp)


def inverse_factor(moments: Array, width: int) -> Array:
    """Return the upper Cholesky factor (width, width) of the inverse of the damped second moments (k, k), k <= width.

    Row i says how the columns after column i compensate for its rounding error.
    """
    # Columns without moments (padding, dead inputs) get the mean moment, and so do not compensate for others.
    full = np.eye(width)
    mean = float(np.diag(moments).mean())
    full *= mean if mean > 0 else 1.0
    full[: len(moments), : len(moments)] = moments
    full[np.diag_indices(width)] += _DAMPING * (mean if mean > 0 else 1.0)
    # Reversing rows and columns turns H = L L^T into H = R R^T with an upper R, and R^-1 is the factor of H^-1.
    upper: Array = _inverse_of_lower(np.linalg.cholesky(full[::-1, ::-1]))[::-1, ::-1]
    return upper.astype(np.float32)


def _inverse_of_lower(lower: Array) -> Array:
    """Invert a lower triangular matrix by halves: [[A, 0], [B, C]] has the inverse [[A', 0], [-C' B A', C']]."""
    size = len(lower)
    if size <= 64:  # arbitrary: smaller halves cost more calls than they save products
        return np.tril(np.linalg.inv(lower))
    half = size // 2
    inverse = np.zeros_like(lower)
    inverse[:half, :half] = _inverse_of_lower(lower[:half, :half])
    inverse[half:, half:] = _inverse_of_lower(lower[half:, half:])
    inverse[half:, :half] = -inverse[half:, half:] @ (lower[half:, :half] @ inverse[:half, :half])
    return inverse


def round_columns(
    weight: Array,
    upper: Array,
    round_column: Callable[[int, Array], Array],
    block_size: int = 32,
    begin: Callable[[int, Array, Array], None] | None = None,
) -> None:
    """Quantize a weight (O, K) column by column, and let later columns compensate for each column's error (GPTQ).

    `round_column(index, column)` quantizes a column and returns the dequantized values. `upper` (K, K) is the upper
    Cholesky factor of the inverse Hessian of the layer's inputs. Columns of the same block are adjusted one by one,
    those of later blocks for the whole block at once. `begin(first, block, importance)` is called before a block is
    rounded, with the loss per squared error of each of its columns.
    """
    weight = weight.copy()
    for first in range(0, weight.shape[1], block_size):
        columns = slice(first, first + block_size)
        block, inner = weight[:, columns], upper[columns, columns]
        if begin is not None:
            begin(first, block, 1 / np.square(np.diag(inner)))
        # Errors are in units of the factor's diagonal, as in Frantar et al., algorithm 1.
        errors = np.empty_like(block)
        for i in range(block.shape[1]):
            column = block[:, i]
            errors[:, i] = (column - round_column(first + i, column)) / inner[i, i]
            block[:, i + 1 :] -= errors[:, i : i + 1] * inner[i, i + 1 :]
        weight[:, first + block_size :] -= errors @ upper[columns, first + block_size :]
