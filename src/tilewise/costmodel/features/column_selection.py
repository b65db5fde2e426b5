"""Selection of TileRanker's configuration features on a sample of the train split, whatever the columns are called.

Columns with few distinct values get thresholds. Columns that can be tile sizes are paired with the sizes of the kernel
that they may divide: the pairs whose tile count and padding explain most of the log runtime are selected.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Configs = Sequence[npt.NDArray[Any]]  # raw configurations, one array (C, columns) per kernel
LogRuntimes = Sequence[npt.NDArray[np.float64]]  # one array (C,) per kernel

DERIVED = re.compile(r"_(sum|product)$")  # names of columns that follow from others
MAX_PADDING = 64.0  # ratio of padded to real size; larger ratios are clipped
_MAX_STEPS = 12  # thresholds of a column
_MAX_PAIRS = 64  # (column, size slot) pairs in all
_MIN_PAIRS_PER_COLUMN = 2
_ROWS_FOR_PAIRS = 16_000  # bounds the time of a fit; results are insensitive to it


def useful_columns(config: npt.NDArray[Any], names: Sequence[str]) -> npt.NDArray[np.int64]:
    """Select the configuration columns that vary, without sums and products whose parts are columns too."""
    all_names = set(names)
    derived = [bool(DERIVED.search(name)) and DERIVED.sub("_0", name) in all_names for name in names]
    return np.flatnonzero((config.max(axis=0) > config.min(axis=0)) & ~np.array(derived))


def distinct_slots(sizes: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Select the size slots that vary, without those that always equal an earlier one."""
    varying = [s for s in range(sizes.shape[1]) if sizes[:, s].max() > sizes[:, s].min()]
    distinct: list[int] = []
    for slot in varying:
        if not any((sizes[:, slot] == sizes[:, other]).all() for other in distinct):
            distinct.append(slot)
    return np.array(distinct, dtype=np.int64)


def fit_steps(config: npt.NDArray[Any], columns: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Choose the thresholds of each column: all of its values if they are few, else quantiles."""
    steps = []
    for column in columns:
        values = np.unique(config[:, column])
        # Many values: thresholds at quantiles that are values of the column.
        if len(values) > _MAX_STEPS:
            shares = np.linspace(0, 1, _MAX_STEPS + 1)[1:]
            values = np.unique(np.quantile(config[:, column], shares, method="nearest"))
        # A column with two values needs no steps; its logarithm says the same.
        if len(values) > 2:
            steps += [(float(column), float(value)) for value in values[1:]]
    return np.array(steps, dtype=np.float64).reshape(-1, 2)


def subsample(configs: Configs, logs: LogRuntimes | None) -> tuple[Configs, LogRuntimes | None]:
    """Take every n-th row, so that selecting pairs takes a fraction of a second on any collection; centre the logs."""
    step = -(-sum(len(c) for c in configs) // _ROWS_FOR_PAIRS)
    return [c[::step] for c in configs], None if logs is None else [_centre(log[::step]) for log in logs]


def fit_pairs(
    columns: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
    configs: Configs,
    logs: LogRuntimes | None,
    sizes: npt.NDArray[np.float64],
) -> npt.NDArray[np.int64]:
    """Select the (column, slot) pairs whose tile count and padding explain most of the runtime, whatever their names.

    Columns that look like flags (values below 4, or fractions) get no pairs. All pairs compete, but every tile
    column keeps at least its best few.
    """
    tiles = tile_columns(columns, np.concatenate(configs))
    if not len(tiles) or not len(slots):
        return np.zeros((0, 2), np.int64)
    explained = np.array([_explained_by_slots(c, slots, configs, sizes, logs) for c in tiles])  # (tiles, slots)
    ranks = (-explained).argsort(axis=1, kind="stable").argsort(axis=1)
    # Adding 1, more than any share, puts every column's best pairs first.
    best = np.argsort(-(explained + (ranks < _MIN_PAIRS_PER_COLUMN)).ravel(), kind="stable")[:_MAX_PAIRS]
    pairs = [(tiles[i // len(slots)], slots[i % len(slots)]) for i in np.sort(best)]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def tile_columns(columns: npt.NDArray[np.int64], config: npt.NDArray[Any]) -> list[int]:
    """Select the columns that can be tile sizes: integers with a value of at least 4."""
    return [int(c) for c in columns if config[:, c].max() >= 4 and (config[:, c] % 1 == 0).all()]


def _explained_by_slots(
    column: int,
    slots: npt.NDArray[np.int64],
    configs: Configs,
    sizes: npt.NDArray[np.float64],
    logs: LogRuntimes | None,
) -> list[float]:
    """Return, for each slot, the share of log runtime that tile count and padding explain beyond the column itself.

    Everything is centred per kernel, because only differences within a kernel matter. Without runtimes the measure is
    how often the column divides the slot.
    """
    tile = np.concatenate([np.maximum(np.abs(c[:, column]), 1.0) for c in configs])
    kernel = np.repeat(np.arange(len(configs)), [len(c) for c in configs])
    if logs is None:
        return [float(np.mean(np.maximum(sizes[kernel, s], 1.0) % tile == 0)) for s in slots]
    # Regress out log2(tile), first from the log runtime and then from both features of a pair.
    log_runtime, own = np.concatenate(logs), _centred(np.log2(tile), kernel)
    own_norm = max(float(own @ own), 1e-9)
    residual = log_runtime - own * (float(own @ log_runtime) / own_norm)
    variance = max(float(residual @ residual), 1e-9)
    explained = []
    for slot in slots:
        size = np.maximum(sizes[kernel, slot], 1.0)
        count = np.ceil(size / tile)
        pair = np.stack([np.log2(count), np.log2(np.minimum(count * tile / size, MAX_PADDING))], axis=1)
        pair = np.stack([_centred(part, kernel) for part in pair.T], axis=1)
        pair -= own[:, None] * (own @ pair / own_norm)
        gram, moment = pair.T @ pair + 1e-6 * len(pair) * np.eye(2), pair.T @ residual
        explained.append(float(moment @ np.linalg.solve(gram, moment)) / variance)
    return explained


def _centred(x: npt.NDArray[np.float64], kernel: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Subtract the mean of each kernel."""
    mean = np.bincount(kernel, x) / np.maximum(np.bincount(kernel), 1)
    return np.asarray(x - mean[kernel])


def _centre(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.asarray(x - x.mean())
