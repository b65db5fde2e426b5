"""Magnitude masks: drop the smallest weights, individually, in N:M groups, or in blocks.

A mask is a boolean array, True where a weight is kept. Ties are broken by position, so a mask has exactly the requested
number of zeros.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.backend.instance_methods import ExplainsMethods
from tilewise.errors import ConfigurationError, DtypeError, ShapeError, as_array, type_name

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]


def checked_sparsity(sparsity: float) -> float:
    """Convert the sparsity to float; ConfigurationError unless it is between 0 and 1."""
    if not isinstance(sparsity, int | float | np.number) or not 0 <= sparsity <= 1:
        text = repr(sparsity) if isinstance(sparsity, int | float | str | np.number) else type_name(sparsity)
        raise ConfigurationError(f"sparsity, the fraction of weights to drop, must be between 0 and 1, not {text}")
    return float(sparsity)


def checked_weights(weights: Any) -> Array:
    """Convert weights to an array; raise unless they are floating-point and not NaN."""
    if hasattr(weights, "named_modules"):
        raise DtypeError(
            f"a {type_name(weights)} is not an array of weights; pass layer.weight, or use prune(model, sparsity) "
            "for a whole model"
        )
    w: Array = as_array(weights)
    if w.dtype.kind != "f":
        kind = type_name(weights) if w.dtype.kind in "OU" else w.dtype
        raise DtypeError(f"weights must be an array of floating-point numbers, not {kind}")
    if np.isnan(w).any():
        raise ConfigurationError("the weights contain NaN, so their magnitudes cannot be compared")
    return w


def magnitude_mask(scores: Array, sparsity: float) -> Mask:
    """Return a mask (True: keep) that drops the fraction `sparsity` of the smallest scores."""
    drop = round(checked_sparsity(sparsity) * scores.size)
    keep = np.ones(scores.size, bool)
    keep[np.argsort(scores.reshape(-1), kind="stable")[:drop]] = False
    return keep.reshape(scores.shape)


def row_mask(scores: Array, sparsity: float) -> Mask:
    """Return a mask (True: keep) that drops the fraction `sparsity` of the smallest scores in each row (output)."""
    rows = scores.reshape(len(scores), -1)
    keep = np.ones(rows.shape, bool)
    drop = round(checked_sparsity(sparsity) * rows.shape[1])
    np.put_along_axis(keep, np.argsort(rows, axis=1, kind="stable")[:, :drop], False, axis=1)
    return keep.reshape(scores.shape)


def n_of_m_mask(weights: Array, n: int, m: int) -> Mask:
    """Return a mask that keeps the `n` largest of every `m` consecutive weights of a row; a filter is one row."""
    if not 0 < n <= m:
        raise ConfigurationError(f"an N:M pattern must keep 1 to M of M weights, not {n} of {m}")
    rows = np.abs(weights.reshape(weights.shape[0] if weights.ndim > 1 else 1, -1))
    if rows.shape[1] % m:
        raise ShapeError(f"rows of {rows.shape[1]} weights cannot be divided into groups of {m}")
    groups = rows.reshape(-1, m)
    # A stable sort breaks ties by position.
    order = np.argsort(-groups, axis=1, kind="stable")
    keep = np.zeros(groups.shape, bool)
    np.put_along_axis(keep, order[:, :n], True, axis=1)
    return keep.reshape(weights.shape)


def block_mask(weights: Array, sparsity: float, height: int, width: int) -> Mask:
    """Return a mask that drops whole blocks of `height` rows by `width` columns with the least sums of squares."""
    rows = weights.reshape(weights.shape[0] if weights.ndim > 1 else 1, -1)
    if rows.shape[0] % height or rows.shape[1] % width:
        size = f"{rows.shape[0]}×{rows.shape[1]}"
        raise ShapeError(f"a matrix of {size} cannot be divided into blocks of {height}×{width}")
    blocks = rows.reshape(rows.shape[0] // height, height, rows.shape[1] // width, width)
    keep = magnitude_mask((blocks.astype(np.float64) ** 2).sum((1, 3)), sparsity)
    return np.repeat(np.repeat(keep, height, 0), width, 1).reshape(weights.shape)


class Pattern:
    """Sparsity pattern: "unstructured", "N:M" such as "2:4", or "block:HxW"."""

    def __init__(self, text: str) -> None:
        """Parse a pattern's name; ConfigurationError if it is not valid."""
        self.text = text = str(text)
        group, block = re.fullmatch(r"(\d+):(\d+)", text), re.fullmatch(r"block:(\d+)x(\d+)", text)
        self.group = (int(group[1]), int(group[2])) if group else None
        self.block = (int(block[1]), int(block[2])) if block else None
        if text != "unstructured" and group is None and block is None:
            raise ConfigurationError(
                f'pattern must be "unstructured", "N:M" or "block:HxW", not {text!r} (sparsity has a keyword)'
            )

    def mask(self, weights: Array, sparsity: float) -> Mask:
        """Return the mask (True: keep) of a weight matrix; an N:M pattern ignores `sparsity`."""
        if self.group is not None:
            return n_of_m_mask(weights, *self.group)
        if self.block is not None:
            return block_mask(weights, sparsity, *self.block)
        return magnitude_mask(np.abs(weights), sparsity)


class MagnitudePruner(metaclass=ExplainsMethods):
    """Sets the smallest weights to zero.

    >>> MagnitudePruner().prune(np.array([[0.1, -3.0], [2.0, 0.2]], np.float32), sparsity=0.5)
    array([[ 0., -3.],
           [ 2.,  0.]], dtype=float32)
    """

    def __init__(self, pattern: str = "unstructured", *, sparsity: float = 0.7) -> None:
        self.pattern, self.sparsity = Pattern(pattern), checked_sparsity(sparsity)

    def prune(self, weights: Any, sparsity: float | None = None) -> Array:
        """Return a pruned copy (of 70 % zeros by default); an N:M pattern determines the sparsity itself."""
        w = checked_weights(weights)
        sparsity = self.sparsity if sparsity is None else checked_sparsity(sparsity)
        if w.size == 0:
            return w.copy()
        return np.where(self.pattern.mask(w, sparsity), w, w.dtype.type(0))
