"""TileRanker's features: sizes and tiles on a log scale, and how each tile divides each dimension of the kernel.

Shapes span six orders of magnitude, so every quantity enters as a logarithm. Whether a tile is good depends on the size
that it divides. The kernel's sizes are read from the graph into a fixed list of slots (the dimensions of the root, of
the heaviest operation and of its operands, and its window). Each configuration column is paired with the slots that it
may divide; the features of a pair are the number of tiles and the padding of the last one. The pairs are selected on
the train split, not by column names: those that explain most of the runtime. Slots that are equal in the whole split
count as one. Sum and product columns are left out, because in logarithms they are linear in the other columns.

TPU collections have the 24 tile columns of TpuGraphs, whose meaning is known: there the pairs are replaced by the
quantities of `tpu_tiles`. On GPUs the occupancy of each configuration is added (see `occupancy`).

Columns with few distinct values also enter as steps ("at least this value"), so that a network can split them as a
decision tree does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import (
    DIMENSIONS,
    NODE_COLUMN,
    OPCODE_NUMBER,
)
from tilewise.costmodel.features.inputs import ModelInputs
from tilewise.costmodel.features.occupancy import Gpu, occupancy_features
from tilewise.errors import FileFormatError

if TYPE_CHECKING:
    from tilewise.costmodel.data.dataset import Split
    from tilewise.costmodel.data.tpu_tiles import TileReading

Floats = npt.NDArray[np.float32]

_HEAVY = tuple(OPCODE_NUMBER[name] for name in ("convolution", "dot", "reduce-window", "reduce"))
_CONTRACTIONS = 2  # the first kinds of _HEAVY
_IS_HEAVY = np.isin(np.arange(256), _HEAVY)
_SHAPE = slice(NODE_COLUMN["shape_dimensions_0"], NODE_COLUMN["shape_dimensions_0"] + DIMENSIONS)
_WINDOW = slice(NODE_COLUMN["window_size_0"], NODE_COLUMN["window_size_0"] + 2)
_STRIDE = slice(NODE_COLUMN["window_stride_0"], NODE_COLUMN["window_stride_0"] + 2)
_TYPES = slice(NODE_COLUMN["shape_element_type_is_invalid_type"], NODE_COLUMN["shape_dimensions_0"])
_ROOT = NODE_COLUMN["is_root"]
_N_SIZES = 4 * DIMENSIONS + 4  # four shapes, two window sizes, two strides
_MAX_DEVIATIONS = np.float32(8)  # inputs are clipped to this many standard deviations of the train split
NO_TILES = np.zeros(0, np.int64)
# Attributes that model files store under an older name.
_STORED_NAMES = {"node_columns": "node_kept"}
MAX_PADDING = 64.0  # ratio of padded to real size; larger ratios are clipped


def kernel_sizes(kernel: Kernel) -> npt.NDArray[np.float64]:
    """Return the sizes that features refer to, zero where a kernel has none.

    They are six sizes each of the root, the heaviest operation and its two operands, then window and stride.
    """
    feat = kernel.node_feat
    # A graph without a marked root ends with its root.
    roots = (feat[:, _ROOT] > 0).nonzero()[0]
    root = int(roots[-1]) if len(roots) else len(feat) - 1
    heavy = heaviest_node(kernel, root)
    operands = kernel.edge_index[kernel.edge_index[:, 0] == heavy, 1].tolist()[:2]
    # Slots of tensors that do not exist stay 0.
    sizes = np.zeros(_N_SIZES)
    shapes = sizes[: 4 * DIMENSIONS].reshape(4, DIMENSIONS)
    shapes[: 2 + len(operands)] = feat[[root, heavy, *operands], _SHAPE]
    sizes[-4:-2], sizes[-2:] = feat[heavy, _WINDOW], feat[heavy, _STRIDE]
    return sizes


def heaviest_node(kernel: Kernel, root: int = -1) -> int:
    """Return the index of the product, convolution or reduction with the most work; else the root."""
    candidates = _IS_HEAVY[kernel.node_opcode].nonzero()[0].tolist()
    if len(candidates) > 1:
        return max(candidates, key=lambda node: _work(kernel, node))
    return (*candidates, root % len(kernel.node_opcode))[0]


def _work(kernel: Kernel, node: int) -> tuple[float, float, int]:
    """Return a sort key for the work of an operation: log2 of its multiply-adds, then of its volume, then its kind.

    For a product of (M, K) and (K, N) the work is sqrt(MK · KN · MN) = MNK; for a reduction it is its operand's size.
    """
    operands = kernel.edge_index[kernel.edge_index[:, 0] == node, 1][:2]
    shapes = np.maximum(kernel.node_feat[[node, *operands.tolist()], _SHAPE].astype(np.float64), 1)
    volumes = np.log2(shapes).sum(axis=1)
    kind = _HEAVY.index(int(kernel.node_opcode[node]))
    work = volumes.sum() / 2 if kind < _CONTRACTIONS else volumes.max()
    return round(float(work), 6), float(volumes[0]), -kind


def _graph_summary(kernel: Kernel) -> npt.NDArray[np.float64]:
    """Return graph features: logs of node, edge and element counts, and the number of parameters."""
    volume = np.maximum(kernel.node_feat[:, _SHAPE].astype(np.float64), 1).prod(axis=1)
    parameters = volume[kernel.node_opcode == OPCODE_NUMBER["parameter"]]
    counts = kernel.n_nodes, len(kernel.edge_index), parameters.sum(), volume.max(), volume.sum(), len(parameters)
    summary = np.array(counts, np.float64)
    summary[:-1] = signed_log(summary[:-1])
    return summary


def signed_log(x: npt.ArrayLike) -> Any:
    """Return log2(1 + |x|) with the sign of x; in float32 if x is float32, else in float64."""
    x = np.asarray(x)
    x = x if x.dtype == np.float32 else x.astype(np.float64)
    return np.copysign(np.log2(np.abs(x) + 1), x)


@dataclass(frozen=True, eq=False)
class RankerFeatures:
    """Fitted preparation of TileRanker's inputs: which features it computes and how they are scaled."""

    kind: ClassVar[str] = "ranker"
    node_columns: npt.NDArray[np.int64]  # indices of the node columns that vary
    node_centre: Floats
    node_scale: Floats
    columns: npt.NDArray[np.int64]  # indices of the configuration columns that are used
    steps: npt.NDArray[np.float64]  # (S, 2): column, threshold; the feature is 1 where column >= threshold, else 0
    pairs: npt.NDArray[np.int64]  # (P, 2): column, size slot
    sizes: npt.NDArray[np.int64]  # indices of the size slots that are used
    global_centre: Floats
    global_scale: Floats
    config_centre: Floats
    config_scale: Floats
    node_low: Floats  # ranges of the raw columns in the train split
    node_high: Floats
    config_low: Floats
    config_high: Floats
    gpu: npt.NDArray[np.float64]  # Gpu.to_array(), or empty
    tile_columns: npt.NDArray[np.int64]  # indices of the `tpu_tiles` features that vary; empty for other collections

    @classmethod
    def fit(cls, split: Split) -> RankerFeatures:
        """Select features on a sample of a split, then fit the mean and scale of each."""
        from tilewise.costmodel.features.ranker_fit import fit_ranker

        return fit_ranker(split)

    @classmethod
    def restore(cls, tensors: Mapping[str, npt.NDArray[Any]]) -> RankerFeatures:
        """Rebuild the preparation from a model file; tables that only some devices need may be missing."""
        defaults = {"gpu": np.zeros(0), "tile_columns": NO_TILES}
        tables: dict[str, Any] = {**defaults, **tensors}
        stored = {name: _STORED_NAMES.get(name, name) for name in _table_names()}
        if any(name not in tables for name in stored.values()):
            raise FileFormatError("The model file lacks the feature tables of a TileRanker; train or export it again.")
        return cls(**{name: tables[stored_name] for name, stored_name in stored.items()})

    @property
    def node_width(self) -> int:
        return len(self.node_columns)

    @property
    def global_width(self) -> int:
        return len(self.global_centre)

    @property
    def config_width(self) -> int:
        return len(self.config_centre) + self.global_width

    def apply(self, kernel: Kernel, rows: npt.NDArray[np.int64] | None = None) -> ModelInputs:
        """Compute the inputs of a kernel: each configuration row has the kernel-wide inputs first, then its own."""
        config = np.asarray(kernel.config_feat if rows is None else kernel.config_feat[rows])
        # The model reads columns by position.
        if config.shape[1] != len(self.config_low) or kernel.node_feat.shape[1] != len(self.node_low):
            raise FileFormatError(f"Kernel {kernel.name} has other columns than the model was trained on.")
        # Tiles are read from the graph as it is, and their quantities follow from definitions, so that they may read
        # columns that were constant in training. The network sees columns that varied in training only.
        reading = self.reading(kernel)
        if reading is None:
            config = _with_constants(config, self.config_low, self.config_high)
        node_feat = _with_constants(kernel.node_feat, self.node_low, self.node_high)
        familiar = kernel if node_feat is kernel.node_feat else dataclasses.replace(kernel, node_feat=node_feat)
        sizes = kernel_sizes(familiar)
        kernel_wide = _standardize(self.raw_global(familiar, sizes, reading), self.global_centre, self.global_scale)
        raw_config = self.raw_config(kernel, sizes, config, reading)
        own = _standardize(raw_config, self.config_centre[:, None], self.config_scale[:, None])
        # The table is (features, C), so that one feature is contiguous in memory.
        table = np.concatenate([np.broadcast_to(kernel_wide[:, None], (self.global_width, len(config))), own])
        node = _standardize(signed_log(node_feat[:, self.node_columns]), self.node_centre, self.node_scale)
        return ModelInputs(node, kernel.node_opcode.astype(np.int64), np.asarray(kernel.edge_index), table.T)

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        names = [name for name in _table_names() if name != "tile_columns" or len(self.tile_columns)]
        return {_STORED_NAMES.get(name, name): np.ascontiguousarray(getattr(self, name)) for name in names}

    def reading(self, kernel: Kernel) -> TileReading | None:
        """Return the tensors that a TPU kernel's tile bounds refer to; None in other collections."""
        if not len(self.tile_columns):
            return None
        from tilewise.costmodel.data.tpu_tiles import read_tiles

        return read_tiles(kernel.node_feat, kernel.node_opcode, kernel.edge_index, kernel.config_feat)

    def raw_global(
        self, kernel: Kernel, sizes: npt.NDArray[np.float64], reading: TileReading | None
    ) -> npt.NDArray[np.float64]:
        """Compute the unscaled kernel-wide inputs: sizes, graph summary, element type of the heaviest operation."""
        if reading is not None:
            from tilewise.costmodel.data.tpu_tiles import tile_kernel_features

            tiles, heavy = tile_kernel_features(reading, kernel.node_feat), reading.node
        else:
            tiles, heavy = signed_log(sizes[self.sizes]), heaviest_node(kernel)
        return np.concatenate([tiles, _graph_summary(kernel), kernel.node_feat[heavy, _TYPES]])

    def raw_config(
        self, kernel: Kernel, sizes: npt.NDArray[np.float64], config: npt.NDArray[Any], reading: TileReading | None
    ) -> Floats:
        """Return unscaled features (features, C) of configurations `config` (C, columns) for a kernel of `sizes`."""
        if reading is not None:
            from tilewise.costmodel.data.tpu_tiles import tile_features

            return tile_features(reading, config)[self.tile_columns].astype(np.float32)
        gpu, columns = Gpu.from_array(self.gpu), np.ascontiguousarray(config.T, np.float32)
        step_columns, thresholds = self.steps[:, 0].astype(np.int64), self.steps[:, 1:].astype(np.float32)
        blocks = [signed_log(columns[self.columns]), columns[step_columns] >= thresholds]
        blocks += _tile_features(columns[self.pairs[:, 0]], sizes[self.pairs[:, 1]][:, None])
        if gpu is not None:
            blocks.append(occupancy_features(gpu, kernel, sizes, config))
        return np.concatenate(blocks).astype(np.float32)


def _table_names() -> list[str]:
    """Return the names of the fitted tables, all of which a model file stores."""
    return [field.name for field in dataclasses.fields(RankerFeatures)]


def _tile_features(tile: Floats, size: npt.NDArray[np.float64]) -> list[Floats]:
    """Return log2 of the number of tiles that cover `size`, and of its padding ratio: two arrays (C,)."""
    tile, size = np.maximum(np.abs(tile), np.float32(1)), np.maximum(size, 1.0).astype(np.float32)
    count = np.ceil(size / tile)
    return [np.log2(count), np.log2(np.minimum(tile * count / size, np.float32(MAX_PADDING)))]


def _with_constants(values: npt.NDArray[Any], low: Floats, high: Floats) -> npt.NDArray[Any]:
    """Set columns that were constant in training (low = high) to that constant, as the model knows no other value."""
    constant = np.flatnonzero(low == high)
    if (values[:, constant] == low[constant]).all():
        return values
    values = values.copy()
    values[:, constant] = low[constant]
    return values


def _standardize(raw: npt.NDArray[Any], centre: Floats, scale: Floats) -> Floats:
    """Return clip((raw - centre) · scale), so that a kernel unlike the training data has bounded inputs."""
    scaled: Floats = (raw.astype(np.float32) - centre) * scale
    return np.clip(scaled, -_MAX_DEVIATIONS, _MAX_DEVIATIONS)
