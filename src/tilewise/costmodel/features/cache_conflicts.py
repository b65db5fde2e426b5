"""Rows that fight for the same cache sets: where a tile walks down more of them than a set has ways.

A cache finds a line by the low bits of its address. Rows of a tensor whose length in bytes is a multiple of a high
power of two therefore share sets, and a tile that takes more such rows side by side than a set has ways throws out what
it is about to read again: the same tile is fast on a matrix of 1,000 columns and slow on one of 1,024. That hangs on
the power of two in a product of sizes, which a network does not find from their logarithms; so it is worked out here.

A `Crowds` table lists which configuration columns may be such rows, along which dimension of which tensor, how many
ways are too few, and which switch (packing, say) makes the difference. It is found in the train split, not read from
names: what says most about runtimes is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.schema import DIMENSIONS

Numbers = npt.NDArray[np.float64]
Crowds = npt.NDArray[np.int64]  # (Q, 5): column, dimension, ways, switch (-1 for none), its state

NO_CROWDS: Crowds = np.zeros((0, 5), np.int64)
_TENSORS = (0, 2, 3)  # of the slots of `ranker.kernel_sizes`: the root and the two operands
_OUTER = DIMENSIONS - 1  # dimensions a tensor may have besides the last
_WAY_BYTES, _LINE_BYTES = 4096, 64  # of a first-level cache on most processors
_WAYS = (8, 12)
_SIDE_BY_SIDE = 32  # a register tile has no more rows; larger tiles take theirs one after another
_LARGEST = float(1 << 50)
_NEVER = 1e9
_MOST = 8
_LEAST_WORTH = 1e-3  # share of the spread of log runtime
_ALIKE = 0.9


def outer_dimensions(sizes: Numbers, element_bytes: float) -> Numbers:
    """(3, 15): of every dimension but the last, of root, first and second operand: rows until one falls on the first
    again, rows there are, bytes of one. Counted from the last dimension: a batch of matrices is like a matrix."""
    found = np.tile([[_NEVER], [1.0], [1.0]], (1, len(_TENSORS) * _OUTER))
    for number, tensor in enumerate(_TENSORS):
        shape = [size for size in sizes[tensor * DIMENSIONS : (tensor + 1) * DIMENSIONS].tolist() if size >= 1]
        stride = element_bytes
        for outward in range(1, len(shape)):
            stride = min(stride * shape[-outward], _LARGEST)
            found[:, number * _OUTER + outward - 1] = _rows_apart(int(stride)), shape[-outward - 1], stride
    return found


def _rows_apart(stride: int) -> float:
    """What lies within a cache line is no row."""
    return _NEVER if stride < _LINE_BYTES else _WAY_BYTES / min(stride & -stride, _WAY_BYTES)


def crowded(crowds: Crowds, outer: Numbers, config: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """(Q, C): whether each configuration (columns, C) has such rows; `outer` is the kernel's (3, 15)."""
    column, dimension, ways, switch, state = crowds.T
    apart, most = outer[:2, dimension].astype(np.float32)
    found = np.minimum(np.abs(config[column]), most[:, None]) > (apart * ways)[:, None]
    return np.asarray(found & ((switch[:, None] < 0) | (config[switch] == state[:, None])))


def fit_crowds(
    columns: Sequence[int],
    switches: Sequence[int],
    config: npt.NDArray[Any],
    kernel: npt.NDArray[np.int64],
    goal: Numbers,
    outer: Numbers,
) -> Crowds:
    """The table, from rows of configurations of kernels numbered by `kernel`, whose (K, 3, 15) `outer` holds.

    `goal` is log runtime. What slows most is taken first, then what slows most of the rest and is not much like one
    that was taken; then a switch is put to each where that says more.
    """
    found: dict[tuple[int, ...], _Effect] = {}
    for column in columns:
        tile = np.abs(config[:, column])
        if tile.max() > _SIDE_BY_SIDE:
            continue
        for dimension in np.flatnonzero((outer[:, 0] < _NEVER).any(axis=0)).tolist():
            effects = _Effects(goal, kernel, _like(tile, outer[kernel, 2, dimension]))
            rows = np.minimum(tile, outer[kernel, 1, dimension]) / outer[kernel, 0, dimension]
            for ways in _WAYS:
                found[column, dimension, ways, -1, 0] = effects.of(rows > ways)
    taken: dict[tuple[int, ...], _Effect] = {}
    for key, effect in sorted(found.items(), key=lambda item: -item[1].worth)[: 8 * _MOST]:
        if len(taken) < _MOST and effect.worth >= _LEAST_WORTH and not any(effect.alike(e) for e in taken.values()):
            taken[key] = effect
    table = [_with_switch(key, effect, switches, config, kernel, goal, outer) for key, effect in taken.items()]
    return np.array(sorted(set(table)), np.int64).reshape(-1, 5)


def _with_switch(
    key: tuple[int, ...],
    effect: _Effect,
    switches: Sequence[int],
    config: npt.NDArray[Any],
    kernel: npt.NDArray[np.int64],
    goal: Numbers,
    outer: Numbers,
) -> tuple[int, ...]:
    best, worth = key, effect.worth
    like = _like(np.abs(config[:, key[0]]), outer[kernel, 2, key[1]])
    for switch in switches:
        effects = _Effects(goal, kernel, 2 * like + (config[:, switch] == 1))
        for state in (0, 1):
            other = effects.of(effect.rows & (config[:, switch] == state)).worth
            if other > worth:
                best, worth = (*key[:3], switch, state), other
    return best


def _like(tile: npt.NDArray[Any], stride: Numbers) -> npt.NDArray[np.int64]:
    """Numbers of groups: the same tile on rows of about the same length, whatever powers of two are in it."""
    return _numbered(tile) * 64 + np.round(np.log2(stride)).astype(np.int64)


def _numbered(values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return np.asarray(np.unique(values, return_inverse=True)[1].ravel(), np.int64)


@dataclass(frozen=True, eq=False)
class _Effect:
    rows: npt.NDArray[np.bool_]
    beyond: Numbers  # of unit length: the rows, without what kernel and group say of them
    worth: float  # the share of log runtime, without the same, by which they are slower; 0 if they are not

    def alike(self, other: _Effect) -> bool:
        return abs(_dot(self.beyond, other.beyond)) > _ALIKE


class _Effects:
    """What yes and no say about log runtime beyond which kernel it is and which of some groups."""

    def __init__(self, goal: Numbers, kernel: npt.NDArray[np.int64], group: npt.NDArray[np.int64]) -> None:
        self.groups = [(numbers, np.maximum(np.bincount(numbers), 1)) for numbers in (kernel, group)]
        self.goal = self._beyond(goal)
        self.spread = max(_dot(self.goal, self.goal), 1e-9)

    def _beyond(self, x: Numbers) -> Numbers:
        for _ in range(2):  # in turns: the two overlap little
            for group, counts in self.groups:
                x = x - (np.bincount(group, x) / counts)[group]
        return x

    def of(self, rows: npt.NDArray[np.bool_]) -> _Effect:
        x = self._beyond(rows.astype(np.float64))
        square = _dot(x, x)
        slower = max(_dot(x, self.goal), 0.0)
        # What hardly varies explains nothing, however well.
        return _Effect(rows, x / max(square**0.5, 1e-9), slower**2 / max(square, 1e-4 * len(x)) / self.spread)


def _dot(x: Numbers, y: Numbers) -> float:
    """Not BLAS's, whose last bits hang on the number of threads."""
    return float((x * y).sum())
