"""What TileRanker reads: sizes and tiles on a log scale, and how each tile meets each dimension of the kernel.

Shapes span six orders of magnitude, so every quantity enters as a logarithm. The idea: a tile is good or bad against
the size it cuts. The kernel's sizes are read from the graph into a fixed list of slots (the root's dimensions, those of
the heaviest operation and of its operands, its window), and each configuration column is set against the slots it may
cut: how many tiles that makes, and how much of the last one is padding. A column numbered like a dimension (``..._3``)
is set against that dimension; any other against every slot that varies. Slots that are equal in all of the train split
are one slot. Sums and products are left out, since in logarithms they are linear in what is kept.

Where configurations are a GPU's, how each would fill the machine enters too (see `occupancy`).

Columns with few distinct values also enter as steps ("at least this value"), which lets a network cut them as a tree
does.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.kernel import Kernel
from tilewise.costmodel.occupancy import Gpu, occupancy
from tilewise.costmodel.prepare import Prepared, extremes
from tilewise.costmodel.schema import DIMENSIONS, NODE_COLUMN, NODE_FEATURES, OPCODE_NUMBER
from tilewise.costmodel.shards import Split
from tilewise.errors import ConfigurationError, FileFormatError

Floats = npt.NDArray[np.float32]

_DERIVED = re.compile(r"_(sum|product)$")
_NUMBERED = re.compile(r"_([0-5])$")
_HEAVY = tuple(OPCODE_NUMBER[name] for name in ("convolution", "dot", "reduce-window", "reduce"))
_SHAPE = slice(NODE_COLUMN["shape_dimensions_0"], NODE_COLUMN["shape_dimensions_0"] + DIMENSIONS)
_WINDOW = slice(NODE_COLUMN["window_size_0"], NODE_COLUMN["window_size_0"] + 2)
_STRIDE = slice(NODE_COLUMN["window_stride_0"], NODE_COLUMN["window_stride_0"] + 2)
_TYPES = slice(NODE_COLUMN["shape_element_type_is_invalid_type"], NODE_COLUMN["shape_dimensions_0"])
_ROOT = NODE_COLUMN["is_root"]
_N_SIZES = 4 * DIMENSIONS + 4
_N_SUMMARY = 6
_MAX_STEPS = 12
_MAX_PAIRS = 160
_KERNELS_FOR_FIT = 2000
_ROWS_FOR_FIT = 512


def kernel_sizes(kernel: Kernel) -> npt.NDArray[np.float64]:
    """The size slots of a kernel: root, heaviest operation, its first two operands (six each), window, stride."""
    feat, opcode = kernel.node_feat, kernel.node_opcode
    roots = np.flatnonzero(feat[:, _ROOT] > 0)
    root = int(roots[-1]) if len(roots) else len(feat) - 1
    heavy = _heaviest(kernel, root)
    operands = [int(v) for u, v in kernel.edge_index[kernel.edge_index[:, 0] == heavy] if opcode[v] >= 0][:2]
    rows = [feat[root, _SHAPE], feat[heavy, _SHAPE], *(feat[v, _SHAPE] for v in operands)]
    rows += [np.zeros(DIMENSIONS, np.float32)] * (4 - len(rows))
    return np.concatenate([*rows, feat[heavy, _WINDOW], feat[heavy, _STRIDE]]).astype(np.float64)


def _heaviest(kernel: Kernel, root: int) -> int:
    for opcode in _HEAVY:
        candidates = np.flatnonzero(kernel.node_opcode == opcode)
        if len(candidates):
            volume = np.maximum(kernel.node_feat[candidates, _SHAPE], 1).prod(axis=1)
            return int(candidates[np.argmax(volume)])
    return root


def _summary(kernel: Kernel) -> npt.NDArray[np.float64]:
    """Counts and volumes of the whole graph, in logarithms."""
    volume = np.maximum(kernel.node_feat[:, _SHAPE].astype(np.float64), 1).prod(axis=1)
    parameters = kernel.node_opcode == OPCODE_NUMBER["parameter"]
    return np.array(
        [
            _log(kernel.n_nodes),
            _log(len(kernel.edge_index)),
            _log(volume[parameters].sum()),
            _log(volume.max()),
            _log(volume.sum()),
            float(parameters.sum()),
        ]
    )


def _log(x: npt.ArrayLike) -> Any:
    """log2(1 + |x|) with the sign of x."""
    x = np.asarray(x, dtype=np.float64)
    return np.sign(x) * np.log2(1.0 + np.abs(x))


@dataclass(frozen=True, eq=False)
class RankerFeatures:
    """The fitted transformation. Node inputs are logs; configuration inputs are [logs, steps, counts, padding], and on
    a GPU [occupancy]."""

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

    _NAMES: ClassVar[tuple[str, ...]] = (
        "node_kept", "node_centre", "node_scale", "columns", "steps", "pairs", "sizes",
        "global_centre", "global_scale", "config_centre", "config_scale",
        "node_low", "node_high", "config_low", "config_high", "gpu",
    )  # fmt: skip

    @classmethod
    def fit(cls, split: Split) -> RankerFeatures:
        if not len(split):
            raise ConfigurationError("The train split is empty, so features cannot be fitted to it.")
        rng = np.random.default_rng(0)
        chosen = np.sort(rng.permutation(len(split))[:_KERNELS_FOR_FIT])
        kernels = [split[int(i)] for i in chosen]
        configs = [_some_rows(k.config_feat, rng).astype(np.float64) for k in kernels]
        sizes = np.stack([kernel_sizes(k) for k in kernels])
        columns = _kept_columns(np.concatenate(configs), split.schema.config_features)
        slots = _kept_slots(sizes)
        gpu = Gpu.read(split.schema)
        draft = cls(
            *_fit_nodes(kernels),
            columns,
            _fit_steps(np.concatenate(configs), columns),
            _fit_pairs(split.schema.config_features, columns, slots, configs, sizes),
            slots,
            *(np.zeros(0, np.float32),) * 4,
            *extremes(split.column("node_feat")),
            *extremes(split.column("config_feat")),
            np.zeros(0) if gpu is None else gpu.numbers(),
        )
        raw_global = np.stack([draft._raw_global(k) for k in kernels])
        raw_config = np.concatenate([draft._raw_config(k, c) for k, c in zip(kernels, configs, strict=True)])
        values = {name: getattr(draft, name) for name in cls._NAMES}
        values["global_centre"], values["global_scale"] = _moments(raw_global)
        values["config_centre"], values["config_scale"] = _moments(raw_config)
        return cls(**values)

    @classmethod
    def restore(cls, tensors: Mapping[str, npt.NDArray[Any]], settings: Mapping[str, Any]) -> RankerFeatures:
        tables = {"gpu": np.zeros(0), **tensors}  # files from before there was one lack it
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
        config = _known(config, self.config_low, self.config_high)
        kernel = dataclasses.replace(kernel, node_feat=_known(kernel.node_feat, self.node_low, self.node_high))
        wide = (self._raw_global(kernel) - self.global_centre) * self.global_scale
        own = (self._raw_config(kernel, config) - self.config_centre) * self.config_scale
        joined = np.empty((len(config), self.config_width), np.float32)
        joined[:, : self.global_width], joined[:, self.global_width :] = _bounded(wide), _bounded(own)
        node = (_log(kernel.node_feat[:, self.node_kept]) - self.node_centre) * self.node_scale
        return Prepared(
            _bounded(node).astype(np.float32),
            kernel.node_opcode.astype(np.int64),
            np.asarray(kernel.edge_index),
            joined,
        )

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        return {name: np.ascontiguousarray(getattr(self, name)) for name in self._NAMES}

    def settings(self) -> dict[str, Any]:
        return {}

    def _raw_global(self, kernel: Kernel) -> npt.NDArray[np.float64]:
        heavy = kernel.node_feat[_heaviest(kernel, len(kernel.node_feat) - 1)]
        return np.concatenate([_log(kernel_sizes(kernel)[self.sizes]), _summary(kernel), heavy[_TYPES]])

    def _raw_config(self, kernel: Kernel, config: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        config = config.astype(np.float64)
        column, threshold = self.steps[:, 0].astype(np.int64), self.steps[:, 1]
        tile = np.maximum(np.abs(config[:, self.pairs[:, 0]]), 1.0)
        sizes, gpu = kernel_sizes(kernel), Gpu.restore(self.gpu)
        size = np.maximum(sizes[self.pairs[:, 1]], 1.0)
        tiles = np.ceil(size / tile)
        padding = np.minimum(tiles * tile / size, 64.0)
        parts = [_log(config[:, self.columns]), config[:, column] >= threshold, np.log2(tiles), np.log2(padding)]
        if gpu is not None:
            parts.append(occupancy(gpu, kernel, sizes, config))
        return np.hstack(parts)


def _known(values: npt.NDArray[Any], low: Floats, high: Floats) -> npt.NDArray[Any]:
    """`values` with every column that was constant in the train split at that constant: nothing was learned of it."""
    constant = np.flatnonzero(high == low)
    if (values[:, constant] == low[constant]).all():
        return values
    values = values.copy()
    values[:, constant] = low[constant]
    return values


def _bounded(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Keeps a kernel far outside the train split from driving the network anywhere."""
    bounded: npt.NDArray[Any] = np.clip(x, -8.0, 8.0)
    return bounded


def _some_rows(config: npt.NDArray[Any], rng: np.random.Generator) -> npt.NDArray[Any]:
    if len(config) <= _ROWS_FOR_FIT:
        return np.asarray(config)
    return np.asarray(config[np.sort(rng.choice(len(config), _ROWS_FOR_FIT, replace=False))])


def _moments(raw: npt.NDArray[np.float64]) -> tuple[Floats, Floats]:
    """Centre and factor of each column; a constant column gets the factor 0."""
    deviation = raw.std(axis=0)
    factor = np.where(deviation > 1e-9, 1.0 / np.maximum(deviation, 1e-9), 0.0)
    return raw.mean(axis=0).astype(np.float32), factor.astype(np.float32)


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
    steps = []
    for column in columns:
        values = np.unique(config[:, column])
        if 2 < len(values) <= _MAX_STEPS:
            steps += [(float(column), float(value)) for value in values[1:]]
    return np.array(steps, dtype=np.float64).reshape(-1, 2)


def _fit_pairs(
    names: Sequence[str],
    columns: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
    configs: Sequence[npt.NDArray[Any]],
    sizes: npt.NDArray[np.float64],
) -> npt.NDArray[np.int64]:
    """Which columns are set against which slots; columns that look like switches (values below 4) against none."""
    everything = np.concatenate(configs)
    pairs = []
    for column in columns:
        values = np.unique(everything[:, column])
        if values.max() < 4 or not np.equal(np.mod(values, 1), 0).all():
            continue
        numbered = _NUMBERED.search(names[column])
        for slot in slots:
            if numbered is None or (slot < 4 * DIMENSIONS and slot % DIMENSIONS == int(numbered[1])):
                pairs.append((column, slot))
    return np.array(pairs[:_MAX_PAIRS], dtype=np.int64).reshape(-1, 2)
