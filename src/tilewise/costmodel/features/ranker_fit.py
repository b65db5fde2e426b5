"""Selection of TileRanker's configuration features on a sample of the train split, whatever the columns are called.

Columns with few distinct values get thresholds. Columns that can be tile sizes are paired with the sizes of the kernel
that they may divide: the pairs whose tile count and padding explain most of the log runtime are selected.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.dataset import Split
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import NODE_FEATURES, TILE_FEATURES, Schema
from tilewise.costmodel.data.tpu_tiles import TILE_FEATURE_COUNT, read_tiles, tile_features
from tilewise.costmodel.devices import H200
from tilewise.costmodel.features.inputs import Preparation
from tilewise.costmodel.features.occupancy import Gpu
from tilewise.costmodel.features.ranker import MAX_PADDING, NO_TILES, Floats, RankerFeatures, kernel_sizes, signed_log
from tilewise.costmodel.features.scaling import extremes
from tilewise.errors import ConfigurationError

Configs = Sequence[npt.NDArray[Any]]  # raw configurations, one array (C, columns) per kernel
LogRuntimes = Sequence[npt.NDArray[np.float64]]  # one array (C,) per kernel

DERIVED = re.compile(r"_(sum|product)$")  # names of columns that follow from others
_MAX_STEPS = 12  # thresholds of a column
_MAX_PAIRS = 64  # (column, size slot) pairs in all
_MIN_PAIRS_PER_COLUMN = 2
_ROWS_FOR_PAIRS = 16_000  # bounds the time of a fit; results are insensitive to it
# Samples for fitting. They bound the time of a fit; results are insensitive to them.
_KERNELS_FOR_FIT = 2000
_ROWS_FOR_FIT = 64_000
_MIN_ROWS_PER_KERNEL = 32


def fit_ranker(split: Split) -> RankerFeatures:
    """Fit TileRanker's features to a split; see `RankerFeatures.fit`."""
    if not len(split):
        raise ConfigurationError("The train split is empty, so features cannot be fitted to it.")
    rng = np.random.default_rng(0)
    sample = np.sort(rng.permutation(len(split))[:_KERNELS_FOR_FIT])
    kernels = [split[int(i)] for i in sample]
    rows = [_sample_rows(k.n_configs, _ROWS_FOR_FIT // len(kernels), rng) for k in kernels]
    configs = [k.config_feat[r].astype(np.float64) for k, r in zip(kernels, rows, strict=True)]
    logs = [np.log(k.target[r]) for k, r in zip(kernels, rows, strict=True)] if split.labelled else None
    sizes = np.stack([kernel_sizes(k) for k in kernels])
    columns = useful_columns(np.concatenate(configs), split.schema.config_features)
    slots = distinct_slots(sizes)
    tiles, tile_tables, readings = NO_TILES, list[Any](), list[Any]([None] * len(kernels))
    if tuple(split.schema.config_features) == TILE_FEATURES:
        columns, slots = columns[:0], slots[:0]
        readings = [read_tiles(k.node_feat, k.node_opcode, k.edge_index, k.config_feat) for k in kernels]
        tile_tables = [tile_features(*row) for row in zip(readings, configs, strict=True)]
        tiles = np.flatnonzero(np.any([np.ptp(table, axis=1) > 0 for table in tile_tables], axis=0))
    gpu = gpu_of(split.schema)
    # The draft has no scaling yet; it computes the raw features that the scaling is fitted to.
    node_columns, node_centre, node_scale = _fit_nodes(kernels)
    node_low, node_high = extremes(split.column("node_feat"))
    config_low, config_high = extremes(split.column("config_feat"))
    unscaled = np.zeros(0, np.float32)
    draft = RankerFeatures(
        node_columns=node_columns, node_centre=node_centre, node_scale=node_scale,
        columns=columns,
        steps=fit_steps(np.concatenate(configs), columns),
        pairs=fit_pairs(columns, slots, *subsample(configs, logs), sizes),
        sizes=slots,
        global_centre=unscaled, global_scale=unscaled, config_centre=unscaled, config_scale=unscaled,
        node_low=node_low, node_high=node_high, config_low=config_low, config_high=config_high,
        gpu=np.zeros(0) if gpu is None else gpu.to_array(),
        tile_columns=tiles,
    )  # fmt: skip
    raw_global = np.stack([draft.raw_global(*row) for row in zip(kernels, sizes, readings, strict=True)])
    # Raw features of all sampled configurations, one row per feature.
    rows_of_kernels = zip(kernels, sizes, (config.astype(np.float32) for config in configs), readings, strict=True)
    raw_tables: list[Any] = [table[tiles].astype(np.float32) for table in tile_tables]
    raw_tables = raw_tables or [draft.raw_config(*row) for row in rows_of_kernels]
    raw_config = np.concatenate(raw_tables, axis=1)
    global_centre, global_scale = _moments(raw_global)
    config_centre, config_scale = _moments(raw_config.T)
    return dataclasses.replace(
        draft,
        global_centre=global_centre,
        global_scale=global_scale,
        config_centre=config_centre,
        config_scale=config_scale,
    )


def prior(features: RankerFeatures) -> tuple[int, float]:
    """Return the input column of TPU kernels' estimated runtime and its factor to natural log; (-1, 0) without one."""
    if TILE_FEATURE_COUNT - 1 not in features.tile_columns:
        return -1, 0.0
    # The estimate is the last of all tile features.
    column = int(np.searchsorted(features.tile_columns, TILE_FEATURE_COUNT - 1))
    return column, float(np.log(2) / features.config_scale[column])


def check_configs_differ(preparation: Preparation) -> None:
    """Raise if the selected features are equal for all configurations, so that none can be ranked."""
    # Kernel-wide columns are equal in all configurations of a kernel.
    if preparation.config_width <= getattr(preparation, "global_width", 0):
        raise ConfigurationError(
            "All configurations of the train split are equal, so there is nothing to rank; measure different ones."
        )


def useful_columns(config: npt.NDArray[Any], names: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return the columns of `config` that vary and are not the sum or product of other columns."""
    all_names = set(names)
    derived = [bool(DERIVED.search(name)) and DERIVED.sub("_0", name) in all_names for name in names]
    return np.flatnonzero((config.max(axis=0) > config.min(axis=0)) & ~np.array(derived))


def distinct_slots(sizes: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return the columns of `sizes` (kernels, slots) that vary and do not repeat an earlier one."""
    varying = [s for s in range(sizes.shape[1]) if sizes[:, s].max() > sizes[:, s].min()]
    distinct: list[int] = []
    for slot in varying:
        if not any((sizes[:, slot] == sizes[:, other]).all() for other in distinct):
            distinct.append(slot)
    return np.array(distinct, dtype=np.int64)


def fit_steps(config: npt.NDArray[Any], columns: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Choose thresholds for each column: all of its values if there are few of them, else quantiles."""
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
    """Keep every n-th configuration, to bound the time of selecting pairs, and centre each kernel's log runtimes."""
    step = -(-sum(len(c) for c in configs) // _ROWS_FOR_PAIRS)
    return [c[::step] for c in configs], None if logs is None else [_centre(log[::step]) for log in logs]


def fit_pairs(
    columns: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
    configs: Configs,
    logs: LogRuntimes | None,
    sizes: npt.NDArray[np.float64],
) -> npt.NDArray[np.int64]:
    """Select the (tile column, size) pairs whose tile count and padding explain most of the variance of log runtime.

    Columns that look like flags (values below 4, or fractions) get no pairs. All pairs compete, but every tile column
    keeps at least its best few.
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
    """Return, for each size, how much of log runtime tile count and padding explain beyond the column itself: 0 to 1.

    Everything is centred per kernel, because only differences within a kernel matter. Without runtimes the measure is
    how often the column divides the size.
    """
    tile = np.concatenate([np.maximum(np.abs(c[:, column]), 1.0) for c in configs])
    kernel = np.repeat(np.arange(len(configs)), [len(c) for c in configs])
    if logs is None:
        return [float(np.mean(np.maximum(sizes[kernel, s], 1.0) % tile == 0)) for s in slots]
    # Regress out log2(tile), first from the log runtime and then from both features of a pair.
    log_runtime, own = np.concatenate(logs), _subtract_group_mean(np.log2(tile), kernel)
    own_norm = max(float(own @ own), 1e-9)
    residual = log_runtime - own * (float(own @ log_runtime) / own_norm)
    variance = max(float(residual @ residual), 1e-9)
    explained = []
    for slot in slots:
        size = np.maximum(sizes[kernel, slot], 1.0)
        count = np.ceil(size / tile)
        pair = np.stack([np.log2(count), np.log2(np.minimum(count * tile / size, MAX_PADDING))], axis=1)
        pair = np.stack([_subtract_group_mean(part, kernel) for part in pair.T], axis=1)
        pair -= own[:, None] * (own @ pair / own_norm)
        gram, moment = pair.T @ pair + 1e-6 * len(pair) * np.eye(2), pair.T @ residual
        explained.append(float(moment @ np.linalg.solve(gram, moment)) / variance)
    return explained


def _subtract_group_mean(x: npt.NDArray[np.float64], kernel_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Subtract from each value the mean of all values with the same kernel."""
    mean = np.bincount(kernel_ids, x) / np.maximum(np.bincount(kernel_ids), 1)
    return np.asarray(x - mean[kernel_ids])


def _centre(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.asarray(x - x.mean())


def _sample_rows(count: int, share: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Draw a kernel's configurations for fitting: `share` of `count`, but at least `_MIN_ROWS_PER_KERNEL`."""
    limit = max(_MIN_ROWS_PER_KERNEL, share)
    return np.arange(count) if count <= limit else np.sort(rng.choice(count, limit, replace=False))


def _moments(raw: npt.NDArray[Any]) -> tuple[Floats, Floats]:
    """Return each column's mean and 1 / standard deviation (0 for a constant column)."""
    deviation = raw.std(axis=0, dtype=np.float64)
    factor = np.where(deviation > 1e-9, 1.0 / np.maximum(deviation, 1e-9), 0.0)
    return raw.mean(axis=0, dtype=np.float64).astype(np.float32), factor.astype(np.float32)


def _fit_nodes(kernels: Sequence[Kernel]) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
    """Select node columns that vary and are not sums or products; return them with means and inverse deviations."""
    rows = np.concatenate([k.node_feat for k in kernels])
    basic = np.array([not DERIVED.search(name) for name in NODE_FEATURES])
    columns = np.flatnonzero((rows.max(axis=0) > rows.min(axis=0)) & basic)
    return columns, *_moments(signed_log(rows[:, columns]))


def gpu_of(schema: Schema) -> Gpu | None:
    """Read the GPU's limits and tile columns from a collection's schema; None if it is not a GPU collection."""
    names = schema.config_features
    if names[: len(TILE_FEATURES)] != TILE_FEATURES or not {"warps", "stages"} <= set(names):
        return None
    machine = schema.extra.get("machine")
    limits: Mapping[str, Any] = machine if isinstance(machine, Mapping) else {}
    multiprocessors = limits.get("multiprocessors", H200.multiprocessors)
    shared_bytes = limits.get("shared_bytes", H200.shared_bytes_per_block)
    if not all(isinstance(value, int | float) and value > 0 for value in (multiprocessors, shared_bytes)):
        return None
    return Gpu(float(multiprocessors), float(shared_bytes), names.index("warps"), names.index("stages"))
