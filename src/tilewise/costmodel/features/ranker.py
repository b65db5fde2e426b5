"""What TileRanker reads: sizes and tiles on a log scale, and how each tile meets each dimension of the kernel.

Shapes span six orders of magnitude, so every quantity enters as a logarithm. The idea: a tile is good or bad against
the size it cuts. The kernel's sizes are read from the graph into a fixed list of slots (the root's dimensions, those of
the heaviest operation and of its operands, its window), and each configuration column is set against the slots it may
cut: how many tiles that makes, and how much of the last one is padding. Which those are is found in the train split,
not read from names: the pairs that say most about runtimes are kept. Slots that are equal in all of it are one slot.
Sums and products are left out, since in logarithms they are linear in what is kept.

Where configurations are a GPU's, how each would fill the machine enters too (see `occupancy`); and where that says
something about runtimes, whether rows of a tile crowd into the same cache sets (see `cache_conflicts`).

Columns with few distinct values also enter as steps ("at least this value"), which lets a network cut them as a tree
does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import DIMENSIONS, NODE_COLUMN, NODE_FEATURES, OPCODE_NUMBER
from tilewise.costmodel.data.shards import Split
from tilewise.costmodel.features.cache_conflicts import NO_CROWDS, Crowds, crowded, fit_crowds, outer_dimensions
from tilewise.costmodel.features.occupancy import Gpu, element_bytes, occupancy
from tilewise.costmodel.features.scaling import Prepared, extremes
from tilewise.errors import ConfigurationError, FileFormatError

Floats = npt.NDArray[np.float32]

_DERIVED = re.compile(r"_(sum|product)$")
_HEAVY = tuple(OPCODE_NUMBER[name] for name in ("convolution", "dot", "reduce-window", "reduce"))
_SHAPE = slice(NODE_COLUMN["shape_dimensions_0"], NODE_COLUMN["shape_dimensions_0"] + DIMENSIONS)
_WINDOW = slice(NODE_COLUMN["window_size_0"], NODE_COLUMN["window_size_0"] + 2)
_STRIDE = slice(NODE_COLUMN["window_stride_0"], NODE_COLUMN["window_stride_0"] + 2)
_TYPES = slice(NODE_COLUMN["shape_element_type_is_invalid_type"], NODE_COLUMN["shape_dimensions_0"])
_ROOT = NODE_COLUMN["is_root"]
_N_SIZES = 4 * DIMENSIONS + 4
_MAX_STEPS = 12
_MAX_PAIRS = 64
_OWN_PAIRS = 2
_MOST_PADDING = 64.0
_FAR = np.float32(8)  # inputs go no further from the train split's middle
_KERNELS_FOR_FIT = 2000
_ROWS_FOR_FIT = 64_000
_ROWS_FOR_PAIRS = 16_000


def kernel_sizes(kernel: Kernel) -> npt.NDArray[np.float64]:
    """The size slots of a kernel: root, heaviest operation, its first two operands (six each), window, stride."""
    feat, opcode = kernel.node_feat, kernel.node_opcode
    roots = (feat[:, _ROOT] > 0).nonzero()[0]
    root = int(roots[-1]) if len(roots) else len(feat) - 1
    heavy = _heaviest(kernel, root)
    sources = kernel.edge_index[kernel.edge_index[:, 0] == heavy, 1].tolist()
    operands = [v for v in sources if opcode[v] >= 0][:2]
    found = np.zeros(_N_SIZES)
    slots = found[: 4 * DIMENSIONS].reshape(4, DIMENSIONS)
    slots[: 2 + len(operands)] = feat[[root, heavy, *operands], _SHAPE]
    found[-4:-2], found[-2:] = feat[heavy, _WINDOW], feat[heavy, _STRIDE]
    return found


def _heaviest(kernel: Kernel, root: int) -> int:
    for opcode in _HEAVY:
        candidates = (kernel.node_opcode == opcode).nonzero()[0]
        if len(candidates) == 1:
            return int(candidates[0])
        if len(candidates):
            volume = np.maximum(kernel.node_feat[candidates, _SHAPE], 1).prod(axis=1)
            return int(candidates[np.argmax(volume)])
    return root


def _summary(kernel: Kernel) -> npt.NDArray[np.float64]:
    """Counts and volumes of the whole graph, in logarithms, and how many parameters it has."""
    volume = np.maximum(kernel.node_feat[:, _SHAPE].astype(np.float64), 1).prod(axis=1)
    parameters = kernel.node_opcode == OPCODE_NUMBER["parameter"]
    given = volume[parameters]
    counts = kernel.n_nodes, len(kernel.edge_index), given.sum(), volume.max(), volume.sum(), len(given)
    found = np.array(counts, np.float64)
    found[:-1] = _log(found[:-1])
    return found


def _log(x: npt.ArrayLike) -> Any:
    """log2(1 + |x|) with the sign of x; in float32 where x is."""
    x = np.asarray(x)
    x = x if x.dtype == np.float32 else x.astype(np.float64)
    return np.copysign(np.log2(np.abs(x) + 1), x)


@dataclass(frozen=True, eq=False)
class RankerFeatures:
    """The fitted transformation. Node inputs are logs; configuration inputs are [logs, steps, counts, padding, crowds],
    and on a GPU [occupancy]."""

    kind: ClassVar[str] = "ranker"
    node_kept: npt.NDArray[np.int64]  # node columns that vary
    node_centre: Floats
    node_scale: Floats
    columns: npt.NDArray[np.int64]  # configuration columns read
    steps: npt.NDArray[np.float64]  # (S, 2): column, threshold
    pairs: npt.NDArray[np.int64]  # (P, 2): column, size slot
    sizes: npt.NDArray[np.int64]  # size slots read
    global_centre: Floats
    global_scale: Floats
    config_centre: Floats
    config_scale: Floats
    node_low: Floats  # ranges of the raw columns in the train split
    node_high: Floats
    config_low: Floats
    config_high: Floats
    gpu: npt.NDArray[np.float64]  # Gpu.numbers(), or empty
    crowds: Crowds

    _NAMES: ClassVar[tuple[str, ...]] = (
        "node_kept", "node_centre", "node_scale", "columns", "steps", "pairs", "sizes",
        "global_centre", "global_scale", "config_centre", "config_scale",
        "node_low", "node_high", "config_low", "config_high", "gpu", "crowds",
    )  # fmt: skip

    @classmethod
    def fit(cls, split: Split) -> RankerFeatures:
        if not len(split):
            raise ConfigurationError("The train split is empty, so features cannot be fitted to it.")
        rng = np.random.default_rng(0)
        chosen = np.sort(rng.permutation(len(split))[:_KERNELS_FOR_FIT])
        kernels = [split[int(i)] for i in chosen]
        rows = [_some_rows(k.n_configs, _ROWS_FOR_FIT // len(kernels), rng) for k in kernels]
        configs = [k.config_feat[r].astype(np.float64) for k, r in zip(kernels, rows, strict=True)]
        goals = [np.log(k.target[r]) for k, r in zip(kernels, rows, strict=True)] if split.labelled else None
        sizes = np.stack([kernel_sizes(k) for k in kernels])
        columns = _kept_columns(np.concatenate(configs), split.schema.config_features)
        slots = _kept_slots(sizes)
        gpu = Gpu.read(split.schema)
        draft = cls(
            *_fit_nodes(kernels),
            columns,
            _fit_steps(np.concatenate(configs), columns),
            _fit_pairs(columns, slots, *_thinned(configs, goals), sizes),
            slots,
            *(np.zeros(0, np.float32),) * 4,
            *extremes(split.column("node_feat")),
            *extremes(split.column("config_feat")),
            np.zeros(0) if gpu is None else gpu.numbers(),
            _fit_crowds(columns, *_thinned(configs, goals), kernels, sizes),
        )
        raw_global = np.stack([draft._raw_global(k, s) for k, s in zip(kernels, sizes, strict=True)])
        raw_config = np.empty((draft._raw_width, sum(len(c) for c in configs)), np.float32)
        starts = np.cumsum([0, *(len(c) for c in configs)])
        for k, s, c, start in zip(kernels, sizes, configs, starts[:-1], strict=True):
            draft._raw_config(k, s, np.ascontiguousarray(c.T, dtype=np.float32), raw_config[:, start : start + len(c)])
        values = {name: getattr(draft, name) for name in cls._NAMES}
        values["global_centre"], values["global_scale"] = _moments(raw_global)
        values["config_centre"], values["config_scale"] = _moments(raw_config.T)
        return cls(**values)

    @classmethod
    def restore(cls, tensors: Mapping[str, npt.NDArray[Any]], settings: Mapping[str, Any]) -> RankerFeatures:
        tables = {"gpu": np.zeros(0), "crowds": NO_CROWDS, **tensors}  # files from before there were any lack them
        if any(name not in tables for name in cls._NAMES):
            raise FileFormatError("The model file lacks the feature tables of a TileRanker.")
        return cls(**{name: tables[name] for name in cls._NAMES})

    @property
    def node_width(self) -> int:
        return len(self.node_kept)

    @property
    def global_width(self) -> int:
        return len(self.global_centre)

    @property
    def config_width(self) -> int:
        return len(self.config_centre) + self.global_width

    def apply(self, kernel: Kernel, rows: npt.NDArray[np.int64] | None = None) -> Prepared:
        """Kernel-wide numbers come first in every configuration row, then the configuration's own."""
        config = np.asarray(kernel.config_feat if rows is None else kernel.config_feat[rows])
        if config.shape[1] != len(self.config_low) or kernel.node_feat.shape[1] != len(self.node_low):
            raise FileFormatError(f"Kernel {kernel.name} has other columns than the model was trained on.")
        known = self.known(config)
        sizes, wide, node = self.graph(kernel)
        # Built with configurations along the rows: a feature is then one run of memory.
        joined = np.empty((self.config_width, len(config)), np.float32)
        joined[: self.global_width] = wide[:, None]
        own = joined[self.global_width :]
        self._raw_config(kernel, sizes, np.ascontiguousarray(known.T), own)
        _scale_rows(own, self.config_centre, self.config_scale)
        return Prepared(node, kernel.node_opcode.astype(np.int64), np.asarray(kernel.edge_index), joined.T)

    def known(self, config: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Configurations with the columns of which nothing was learned at what they were in the train split."""
        return _known(config, self._constant_config, self.config_low)

    def graph(self, kernel: Kernel) -> tuple[npt.NDArray[np.float64], Floats, Floats]:
        """The kernel's sizes, its kernel-wide inputs and its node inputs."""
        known = _known(kernel.node_feat, self._constant_node, self.node_low)
        kernel = kernel if known is kernel.node_feat else Kernel(**(vars(kernel) | {"node_feat": known}))
        sizes = kernel_sizes(kernel)
        wide = _scaled(self._raw_global(kernel, sizes), self.global_centre, self.global_scale)
        node = _scaled(_log(kernel.node_feat[:, self.node_kept]), self.node_centre, self.node_scale)
        return sizes, wide, node

    @cached_property
    def _constant_config(self) -> npt.NDArray[np.int64]:
        return np.flatnonzero(self.config_high == self.config_low)

    @cached_property
    def _constant_node(self) -> npt.NDArray[np.int64]:
        return np.flatnonzero(self.node_high == self.node_low)

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        return {name: np.ascontiguousarray(getattr(self, name)) for name in self._NAMES}

    def settings(self) -> dict[str, Any]:
        return {}

    def _raw_global(self, kernel: Kernel, sizes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        heavy = kernel.node_feat[_heaviest(kernel, len(kernel.node_feat) - 1), _TYPES]
        return np.concatenate([_log(sizes[self.sizes]), _summary(kernel), heavy])

    def _raw_config(self, kernel: Kernel, sizes: npt.NDArray[np.float64], config: Floats, out: Floats) -> None:
        """Of (columns, C) configurations: logs, steps reached, logs of tile counts and padding, crowds, occupancy."""
        gpu = Gpu.restore(self.gpu)
        ends = np.cumsum([len(self.columns), len(self.steps), len(self.pairs), len(self.pairs), len(self.crowds)])
        logs, steps, counts, padding, crowds, filling = np.split(out, ends)
        logs[:] = _log(config[self.columns])
        np.greater_equal(config[self._step_columns], self._thresholds, out=steps)
        _cut(config[self.pairs[:, 0]], sizes[self.pairs[:, 1]][:, None], counts, padding)
        if len(self.crowds):
            crowds[:] = crowded(self.crowds, _outer(kernel, sizes), config)
        if gpu is not None:
            filling[:] = occupancy(gpu, kernel, sizes, config.T).T

    # For configurations by the values of their columns (see `models.numpy.tabled`)

    def of_values(self, values: Floats, owner: npt.NDArray[np.int64]) -> Floats:
        """The logs and steps, a row for each value of a column `owner`; 0 where they are of another column."""
        told = np.vstack([np.tile(_log(values), (len(self.columns), 1)), values >= self._thresholds])
        own = np.concatenate([self.columns, self._step_columns])[:, None] == owner
        told = told.astype(np.float32)
        _scale_rows(told, self.config_centre[: len(told)], self.config_scale[: len(told)])
        return np.ascontiguousarray((told * own).T)

    def scaling_of_pairs(self, pairs: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Centre and scale of what `of_pairs` gives, two rows."""
        columns = len(self.columns) + len(self.steps) + np.stack([pairs, len(self.pairs) + pairs])
        return self.config_centre[columns], self.config_scale[columns]

    def of_pairs(self, values: Floats, sizes: npt.NDArray[np.float64], scaling: tuple[Floats, Floats]) -> Floats:
        """Logs of tile counts and of padding, two rows: of each value against the size of its pair."""
        told = np.empty((2, len(values)), np.float32)
        _cut(values, sizes, told[0], told[1])
        told -= scaling[0]
        told *= scaling[1]
        return _bounded(told)

    def scaled_filling(self, told: npt.NDArray[Any]) -> Floats:
        """How configurations fill the GPU, a row a number as `Filling.told` gives them, as inputs."""
        scaled = told.astype(np.float32, copy=False)
        _scale_rows(scaled, self.config_centre[-len(scaled) :], self.config_scale[-len(scaled) :])
        return scaled

    @cached_property
    def _step_columns(self) -> npt.NDArray[np.int64]:
        return self.steps[:, 0].astype(np.int64)

    @cached_property
    def _thresholds(self) -> Floats:
        return self.steps[:, 1:].astype(np.float32)

    @property
    def _raw_width(self) -> int:
        gpu = Gpu.restore(self.gpu)
        cuts = len(self.columns) + len(self.steps) + 2 * len(self.pairs) + len(self.crowds)
        return cuts + (0 if gpu is None else gpu.width)


def _cut(tile: Floats, size: npt.NDArray[np.float64], counts: Floats, padding: Floats) -> None:
    """Logs of how many tiles cover a size, and of how much more than it they hold."""
    tile, size = np.maximum(np.abs(tile), np.float32(1)), np.maximum(size, 1.0).astype(np.float32)
    tiles = np.ceil(size / tile)
    np.log2(tiles, out=counts)
    tile *= tiles
    tile /= size
    np.log2(np.minimum(tile, np.float32(_MOST_PADDING), out=tile), out=padding)


def _outer(kernel: Kernel, sizes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return outer_dimensions(sizes, element_bytes(kernel))


def _known(values: npt.NDArray[Any], constant: npt.NDArray[np.int64], low: Floats) -> npt.NDArray[Any]:
    """`values` with every column that was constant in the train split at that constant: nothing was learned of it."""
    if (values[:, constant] == low[constant]).all():
        return values
    values = values.copy()
    values[:, constant] = low[constant]
    return values


def _scaled(raw: npt.NDArray[np.float64], centre: Floats, scale: Floats) -> Floats:
    """Centred and scaled, the last axis being features."""
    x = np.ascontiguousarray(raw.T, dtype=np.float32)
    _scale_rows(x, centre, scale)
    return x.T


def _scale_rows(x: Floats, centre: Floats, scale: Floats) -> None:
    """In place, in float32; bounded, so that a kernel far outside the train split drives nothing anywhere."""
    shape = (-1, *[1] * (x.ndim - 1))
    x -= centre.reshape(shape)
    x *= scale.reshape(shape)
    _bounded(x)


def _bounded(x: Floats) -> Floats:
    """In place. Two comparisons, which take less time than `np.clip` takes to begin."""
    np.maximum(x, -_FAR, out=x)
    return np.minimum(x, _FAR, out=x)


def _some_rows(count: int, share: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """The kernel's share of the rows to fit to, but never fewer than a handful."""
    most = max(32, share)
    return np.arange(count) if count <= most else np.sort(rng.choice(count, most, replace=False))


def _centre(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.asarray(x - x.mean())


def _moments(raw: npt.NDArray[Any]) -> tuple[Floats, Floats]:
    """Centre and factor of each column; a constant column gets the factor 0."""
    deviation = raw.std(axis=0, dtype=np.float64)
    factor = np.where(deviation > 1e-9, 1.0 / np.maximum(deviation, 1e-9), 0.0)
    return raw.mean(axis=0, dtype=np.float64).astype(np.float32), factor.astype(np.float32)


def _fit_nodes(kernels: Sequence[Kernel]) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
    rows = np.concatenate([k.node_feat for k in kernels])
    own = np.array([not _DERIVED.search(name) for name in NODE_FEATURES])
    kept = np.flatnonzero((rows.max(axis=0) > rows.min(axis=0)) & own)
    return kept, *_moments(_log(rows[:, kept]))


def _kept_columns(config: npt.NDArray[Any], names: Sequence[str]) -> npt.NDArray[np.int64]:
    """Columns that vary; a sum or product is dropped where its parts are there."""
    known = set(names)
    whole = [bool(_DERIVED.search(name)) and _DERIVED.sub("_0", name) in known for name in names]
    return np.flatnonzero((config.max(axis=0) > config.min(axis=0)) & ~np.array(whole))


def _kept_slots(sizes: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    varying = [s for s in range(sizes.shape[1]) if sizes[:, s].max() > sizes[:, s].min()]
    kept: list[int] = []
    for slot in varying:
        if not any((sizes[:, slot] == sizes[:, other]).all() for other in kept):
            kept.append(slot)
    return np.array(kept, dtype=np.int64)


def _fit_steps(config: npt.NDArray[Any], columns: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Thresholds of each column: all its values where they are few, else quantiles."""
    steps = []
    for column in columns:
        values = np.unique(config[:, column])
        if len(values) > _MAX_STEPS:
            shares = np.linspace(0, 1, _MAX_STEPS + 1)[1:]
            values = np.unique(np.quantile(config[:, column], shares, method="nearest"))
        if len(values) > 2:
            steps += [(float(column), float(value)) for value in values[1:]]
    return np.array(steps, dtype=np.float64).reshape(-1, 2)


def _thinned(
    configs: Sequence[npt.NDArray[Any]], goals: Sequence[npt.NDArray[np.float64]] | None
) -> tuple[Sequence[npt.NDArray[Any]], Sequence[npt.NDArray[np.float64]] | None]:
    """Every so manieth row, so that choosing pairs takes a fraction of a second whatever the collection."""
    step = -(-sum(len(c) for c in configs) // _ROWS_FOR_PAIRS)
    return [c[::step] for c in configs], None if goals is None else [_centre(g[::step]) for g in goals]


def _fit_pairs(
    columns: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
    configs: Sequence[npt.NDArray[Any]],
    goals: Sequence[npt.NDArray[np.float64]] | None,
    sizes: npt.NDArray[np.float64],
) -> npt.NDArray[np.int64]:
    """Which columns are set against which slots: those where doing so says most about runtimes, whatever their names.

    Columns that look like switches (values below 4, or fractions) are set against none. Each of the others competes
    with all slots, and each keeps its best few whatever the rest do.
    """
    tiles = _tile_columns(columns, np.concatenate(configs))
    if not len(tiles) or not len(slots):
        return np.zeros((0, 2), np.int64)
    worth = np.array([_worth_of_slots(c, slots, configs, sizes, goals) for c in tiles])  # (tiles, slots)
    ranks = (-worth).argsort(axis=1, kind="stable").argsort(axis=1)
    first = np.argsort(-(worth + (ranks < _OWN_PAIRS)).ravel(), kind="stable")[:_MAX_PAIRS]
    pairs = [(tiles[i // len(slots)], slots[i % len(slots)]) for i in np.sort(first)]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _tile_columns(columns: npt.NDArray[np.int64], config: npt.NDArray[Any]) -> list[int]:
    return [int(c) for c in columns if config[:, c].max() >= 4 and (config[:, c] % 1 == 0).all()]


def _fit_crowds(
    columns: npt.NDArray[np.int64],
    configs: Sequence[npt.NDArray[Any]],
    goals: Sequence[npt.NDArray[np.float64]] | None,
    kernels: Sequence[Kernel],
    sizes: npt.NDArray[np.float64],
) -> Crowds:
    """Nothing without runtimes."""
    if goals is None:
        return NO_CROWDS
    config = np.concatenate(configs)
    switches = [int(c) for c in columns if np.isin(config[:, c], (0, 1)).all()]
    outer = np.stack([_outer(k, s) for k, s in zip(kernels, sizes, strict=True)])
    numbers = np.repeat(np.arange(len(configs)), [len(c) for c in configs])
    return fit_crowds(_tile_columns(columns, config), switches, config, numbers, np.concatenate(goals), outer)


def _worth_of_slots(
    column: int,
    slots: npt.NDArray[np.int64],
    configs: Sequence[npt.NDArray[Any]],
    sizes: npt.NDArray[np.float64],
    goals: Sequence[npt.NDArray[np.float64]] | None,
) -> list[float]:
    """For each slot, the share of log runtime that tile count and padding explain beyond the column itself.

    All is centred kernel by kernel, since only differences within a kernel matter. Without runtimes, how often the
    column divides the slot stands in.
    """
    tile = np.concatenate([np.maximum(np.abs(c[:, column]), 1.0) for c in configs])
    kernel = np.repeat(np.arange(len(configs)), [len(c) for c in configs])
    if goals is None:
        return [float(np.mean(np.maximum(sizes[kernel, s], 1.0) % tile == 0)) for s in slots]
    goal, own = np.concatenate(goals), _centred(np.log2(tile), kernel)
    own_norm = max(float(own @ own), 1e-9)
    goal = goal - own * (float(own @ goal) / own_norm)
    spread = max(float(goal @ goal), 1e-9)
    worth = []
    for slot in slots:
        size = np.maximum(sizes[kernel, slot], 1.0)
        count = np.ceil(size / tile)
        pair = np.stack([np.log2(count), np.log2(np.minimum(count * tile / size, _MOST_PADDING))], axis=1)
        pair = np.stack([_centred(part, kernel) for part in pair.T], axis=1)
        pair -= own[:, None] * (own @ pair / own_norm)
        gram, against = pair.T @ pair + 1e-6 * len(pair) * np.eye(2), pair.T @ goal
        worth.append(float(against @ np.linalg.solve(gram, against)) / spread)
    return worth


def _centred(x: npt.NDArray[np.float64], kernel: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    mean = np.bincount(kernel, x) / np.maximum(np.bincount(kernel), 1)
    return np.asarray(x - mean[kernel])
