"""Cache conflicts: tiles with more rows in the same cache sets than a set has ways.

A cache selects a set by the low bits of the address. If the row length in bytes is a multiple of a high power of two,
the rows of a tensor fall into the same few sets, and a tile that spans more such rows than a set has ways evicts lines
that it is about to read again. The same tile is then fast on a matrix of 1,000 columns and slow on one of 1,024. This
depends on the power of two in a product of sizes, which a network cannot learn from logarithms, so it is computed here.

A `CacheConflicts` table lists which configuration columns can be such rows, along which dimension of which tensor, how
many ways are too few, and which flag (packing, for example) matters. It is fitted to the train split, not read from
column names: the entries that explain most of the log runtime are selected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.schema import DIMENSIONS

Numbers = npt.NDArray[np.float64]
CacheConflicts = npt.NDArray[np.int64]  # (Q, 5): column, dimension, ways, flag column (-1 for none), flag value

NO_CONFLICTS: CacheConflicts = np.zeros((0, 5), np.int64)
_TENSORS = (0, 2, 3)  # slots of `ranker.kernel_sizes`: the root and the two operands
_OUTER = DIMENSIONS - 1  # outer dimensions of a tensor: all but the last
_WAY_BYTES, _LINE_BYTES = 4096, 64  # L1 data cache of x86 and most ARM processors
_WAYS = (8, 12)  # associativities of current L1 data caches
_MAX_REGISTER_ROWS = 32  # larger tiles are not register tiles: their rows are read one after another
_MAX_STRIDE = float(1 << 50)  # keeps products of sizes exact in float64
_NEVER = 1e9  # "rows until a conflict" where none can occur
_MAX_ENTRIES = 8
_MIN_EXPLAINED = 1e-3  # share of the variance of log runtime that an entry must explain
_DUPLICATE_CORRELATION = 0.9


def outer_dimensions(sizes: Numbers, element_bytes: float) -> Numbers:
    """Describe every dimension but the last of the root and both operands as (3, 15) numbers.

    The rows are: how many rows apart two rows share a cache set, the number of rows, and bytes per row. Dimensions are
    counted from the last, so that a batch of matrices is described like a matrix.
    """
    table = np.tile([[_NEVER], [1.0], [1.0]], (1, len(_TENSORS) * _OUTER))
    for number, tensor in enumerate(_TENSORS):
        shape = [size for size in sizes[tensor * DIMENSIONS : (tensor + 1) * DIMENSIONS].tolist() if size >= 1]
        stride = element_bytes
        for outward in range(1, len(shape)):
            stride = min(stride * shape[-outward], _MAX_STRIDE)
            column = number * _OUTER + outward - 1
            table[:, column] = _rows_until_conflict(int(stride)), shape[-outward - 1], stride
    return table


def _rows_until_conflict(stride: int) -> float:
    """Return how many rows apart two rows share a set; rows shorter than a cache line never conflict."""
    return _NEVER if stride < _LINE_BYTES else _WAY_BYTES / min(stride & -stride, _WAY_BYTES)


def has_conflicts(table: CacheConflicts, outer: Numbers, config: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return (Q, C): whether each table entry applies to each configuration.

    `config` is (columns, C); `outer` is the kernel's (3, 15) table from `outer_dimensions`.
    """
    column, dimension, ways, flag, value = table.T
    period, n_rows = outer[:2, dimension].astype(np.float32)
    too_many = np.minimum(np.abs(config[column]), n_rows[:, None]) > (period * ways)[:, None]
    return np.asarray(too_many & ((flag[:, None] < 0) | (config[flag] == value[:, None])))


@dataclass(frozen=True, eq=False)
class ConflictSamples:
    """Measured configurations to fit a table to: M rows of K kernels."""

    config: npt.NDArray[Any]  # (M, columns)
    kernel: npt.NDArray[np.int64]  # (M,): index into `outer`
    log_runtime: Numbers  # (M,)
    outer: Numbers  # (K, 3, 15) from `outer_dimensions`

    def group_by_tile(self, column: int, dimension: int) -> npt.NDArray[np.int64]:
        """Number the groups of equal tiles on rows of about the same length, whatever its powers of two."""
        tile, stride = np.abs(self.config[:, column]), self.outer[self.kernel, 2, dimension]
        tile_index = np.asarray(np.unique(tile, return_inverse=True)[1].ravel(), np.int64)
        return np.asarray(tile_index * 64 + np.round(np.log2(stride)).astype(np.int64))


def fit_cache_conflicts(columns: Sequence[int], flags: Sequence[int], samples: ConflictSamples) -> CacheConflicts:
    """Select the entries that explain most of the log runtime, by greedy forward selection.

    Entries that correlate strongly with one already selected are skipped. Finally a flag is attached to an entry if
    the entry explains more with it.
    """
    # 1. The effect of every candidate (column, dimension, ways).
    config, kernel, outer = samples.config, samples.kernel, samples.outer
    candidates: dict[tuple[int, ...], _Effect] = {}
    for column in columns:
        tile = np.abs(config[:, column])
        if tile.max() > _MAX_REGISTER_ROWS:
            continue
        for dimension in np.flatnonzero((outer[:, 0] < _NEVER).any(axis=0)).tolist():
            regression = _ResidualEffects(samples.log_runtime, kernel, samples.group_by_tile(column, dimension))
            rows = np.minimum(tile, outer[kernel, 1, dimension]) / outer[kernel, 0, dimension]
            for ways in _WAYS:
                candidates[column, dimension, ways, -1, 0] = regression.effect(rows > ways)
    # 2. Greedy selection, largest effect first.
    selected: dict[tuple[int, ...], _Effect] = {}
    for key, effect in sorted(candidates.items(), key=lambda item: -item[1].explained)[: 8 * _MAX_ENTRIES]:
        duplicate = any(effect.correlates(other) for other in selected.values())
        if len(selected) < _MAX_ENTRIES and effect.explained >= _MIN_EXPLAINED and not duplicate:
            selected[key] = effect
    # 3. Flags.
    table = [_with_best_flag(key, effect, flags, samples) for key, effect in selected.items()]
    return np.array(sorted(set(table)), np.int64).reshape(-1, 5)


def _with_best_flag(
    key: tuple[int, ...], effect: _Effect, flags: Sequence[int], samples: ConflictSamples
) -> tuple[int, ...]:
    """Restrict an entry to the flag value with which it explains most, if any improves it."""
    best, explained = key, effect.explained
    group = samples.group_by_tile(key[0], key[1])
    for flag in flags:
        flag_values = samples.config[:, flag]
        regression = _ResidualEffects(samples.log_runtime, samples.kernel, 2 * group + (flag_values == 1))
        for value in (0, 1):
            with_flag = regression.effect(effect.applies & (flag_values == value)).explained
            if with_flag > explained:
                best, explained = (*key[:3], flag, value), with_flag
    return best


@dataclass(frozen=True, eq=False)
class _Effect:
    """Effect of a yes/no indicator on log runtime after removing kernel and group means."""

    applies: npt.NDArray[np.bool_]  # the indicator
    direction: Numbers  # the indicator without kernel and group means, normalized to length 1
    explained: float  # share of the residual log runtime explained by being slower; 0 if the rows are not slower

    def correlates(self, other: _Effect) -> bool:
        return abs(_dot(self.direction, other.direction)) > _DUPLICATE_CORRELATION


class _ResidualEffects:
    """Regression of log runtime on indicators after removing the means of kernels and of groups.

    This is the partial regression of Frisch, Waugh and Lovell with two sets of fixed effects.
    """

    def __init__(self, log_runtime: Numbers, kernel: npt.NDArray[np.int64], group: npt.NDArray[np.int64]) -> None:
        self.groupings = [(index, np.maximum(np.bincount(index), 1)) for index in (kernel, group)]
        self.residual = self._without_means(log_runtime)
        self.variance = max(_dot(self.residual, self.residual), 1e-9)

    def _without_means(self, x: Numbers) -> Numbers:
        # Alternating projections; two rounds suffice because the two groupings overlap little.
        for _ in range(2):
            for index, counts in self.groupings:
                x = x - (np.bincount(index, x) / counts)[index]
        return x

    def effect(self, applies: npt.NDArray[np.bool_]) -> _Effect:
        x = self._without_means(applies.astype(np.float64))
        square = _dot(x, x)
        slower = max(_dot(x, self.residual), 0.0)
        # The lower bound of the denominator keeps an indicator that hardly varies from explaining anything.
        explained = slower**2 / max(square, 1e-4 * len(x)) / self.variance
        return _Effect(applies, x / max(square**0.5, 1e-9), explained)


def _dot(x: Numbers, y: Numbers) -> float:
    """Dot product without BLAS, whose last bits depend on the number of threads."""
    return float((x * y).sum())
