"""Which weights to drop: the smallest, alone, in N:M groups, or in blocks.

A mask is a boolean array, True where a weight stays. Ties are broken by position, so a mask has exactly the number of
zeros asked for.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import ConfigurationError, DtypeError, ShapeError

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]


def checked_sparsity(sparsity: float) -> float:
    if not isinstance(sparsity, int | float | np.number) or not 0 <= sparsity <= 1:
        raise ConfigurationError(f"sparsity is the share of weights to drop, between 0 and 1, not {sparsity!r}")
    return float(sparsity)


def checked_weights(weights: Any) -> Array:
    w = np.asarray(weights)
    if w.dtype.kind != "f":
        raise DtypeError(f"weights must be floating point, not {w.dtype}")
    if np.isnan(w).any():
        raise ConfigurationError("the weights hold NaN, so their magnitudes cannot be compared")
    return w


def magnitude_mask(scores: Array, sparsity: float) -> Mask:
    """Drops the `sparsity` share of the smallest scores."""
    drop = round(checked_sparsity(sparsity) * scores.size)
    keep = np.ones(scores.size, bool)
    keep[np.argsort(scores.reshape(-1), kind="stable")[:drop]] = False
    return keep.reshape(scores.shape)


def n_of_m_mask(weights: Array, n: int, m: int) -> Mask:
    """Keeps the `n` largest of every `m` neighbours along the last axis of the flattened rows."""
    if not 0 < n <= m:
        raise ConfigurationError(f"an N:M pattern keeps 1 to M of M weights, not {n} of {m}")
    rows = np.abs(weights.reshape(weights.shape[0] if weights.ndim > 1 else 1, -1))
    if rows.shape[1] % m:
        raise ShapeError(f"rows of {rows.shape[1]} weights cannot be cut into groups of {m}")
    groups = rows.reshape(-1, m)
    order = np.argsort(-groups, axis=1, kind="stable")
    keep = np.zeros(groups.shape, bool)
    np.put_along_axis(keep, order[:, :n], True, axis=1)
    return keep.reshape(weights.shape)


def block_mask(weights: Array, sparsity: float, height: int, width: int) -> Mask:
    """Drops whole blocks of `height` rows by `width` columns, those with the smallest sums of squares."""
    rows = weights.reshape(weights.shape[0] if weights.ndim > 1 else 1, -1)
    if rows.shape[0] % height or rows.shape[1] % width:
        raise ShapeError(f"a matrix of {rows.shape[0]}×{rows.shape[1]} cannot be cut into blocks of {height}×{width}")
    blocks = rows.reshape(rows.shape[0] // height, height, rows.shape[1] // width, width)
    keep = magnitude_mask((blocks.astype(np.float64) ** 2).sum((1, 3)), sparsity)
    return np.repeat(np.repeat(keep, height, 0), width, 1).reshape(weights.shape)


class Pattern:
    """ "unstructured", "N:M" such as "2:4", or "block:HxW"."""

    def __init__(self, text: str) -> None:
        self.text = text
        group, block = re.fullmatch(r"(\d+):(\d+)", text), re.fullmatch(r"block:(\d+)x(\d+)", text)
        self.group = (int(group[1]), int(group[2])) if group else None
        self.block = (int(block[1]), int(block[2])) if block else None
        if text != "unstructured" and group is None and block is None:
            raise ConfigurationError(f'a pattern is "unstructured", "N:M" or "block:HxW", not {text!r}')

    def mask(self, weights: Array, sparsity: float) -> Mask:
        if self.group is not None:
            return n_of_m_mask(weights, *self.group)
        if self.block is not None:
            return block_mask(weights, sparsity, *self.block)
        return magnitude_mask(np.abs(weights), sparsity)


class MagnitudePruner:
    """Sets the smallest weights to zero.

    >>> MagnitudePruner().prune(np.array([[0.1, -3.0], [2.0, 0.2]], np.float32), sparsity=0.5)
    array([[ 0., -3.],
           [ 2.,  0.]], dtype=float32)
    """

    def __init__(self, pattern: str = "unstructured") -> None:
        self.pattern = Pattern(pattern)

    def prune(self, weights: Any, sparsity: float = 0.7) -> Array:
        """A pruned copy; an N:M pattern decides its own sparsity."""
        w = checked_weights(weights)
        checked_sparsity(sparsity)
        if w.size == 0:
            return w.copy()
        return np.where(self.pattern.mask(w, sparsity), w, w.dtype.type(0))
