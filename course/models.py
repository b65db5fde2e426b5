"""The models to hand in, as Keras classes: the five baselines and TileRanker, for the course's grader.

This file stands alone (TensorFlow, TF-GNN and NumPy), because the grader puts it in the place of its own. A model reads
a `GraphTensor` whose features are scaled already and gives one score per configuration, lower = faster. The opcode
table always has 121 rows, whatever `num_ops` the data suggest, so that the variables fit every collection.

To write your own: derive from `TileModel`, build the layers in `__init__`, and define `score(graph, configs)`; then
train it with `python tiles_train.py --framework=keras --model=YourClass`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_gnn as tfgnn

OPCODES = 121
REGULARISATION = 1e-4
ELEMENTS_AT_ONCE = 1 << 25  # of one (nodes, configurations, hidden) array when a kernel is ranked


class Graph(NamedTuple):
    """What the models read of a `GraphTensor`: K kernels with N nodes and M edges in all."""

    feats: tf.Tensor  # (N, F)
    opcode: tf.Tensor  # (N,)
    kernel: tf.Tensor  # (N,) the kernel each node belongs to
    kernels: int | tf.Tensor  # K
    consumer: tf.Tensor  # (M,)
    producer: tf.Tensor  # (M,)

    @property
    def nodes(self) -> tf.Tensor:
        return tf.shape(self.feats)[0]

    def from_consumers(self, x: tf.Tensor) -> tf.Tensor:
        """A x: each node gets the sum over those that consume its output."""
        return tf.math.unsorted_segment_sum(tf.gather(x, self.consumer), self.producer, self.nodes)

    def from_producers(self, x: tf.Tensor) -> tf.Tensor:
        """Aᵀ x: each node gets the sum over its operands."""
        return tf.math.unsorted_segment_sum(tf.gather(x, self.producer), self.consumer, self.nodes)

    def pool(self, x: tf.Tensor, reduction: str) -> tf.Tensor:
        """(N, ...) to (K, ...)."""
        reduce = {
            "sum": tf.math.unsorted_segment_sum,
            "mean": tf.math.unsorted_segment_mean,
            "max": tf.math.unsorted_segment_max,
        }[reduction]
        return reduce(x, self.kernel, self.kernels)


def read_graph(graph: tfgnn.GraphTensor) -> Graph:
    """The parts of a `GraphTensor` with one or several kernels merged."""
    ops, edges = graph.node_sets["op"], graph.edge_sets["feed"].adjacency
    sizes = tf.cast(ops.sizes, tf.int32)
    kernels = ops.sizes.shape[0] or tf.shape(sizes)[0]
    kernel = tf.repeat(tf.range(kernels), sizes)
    opcode = tf.cast(ops["op"], tf.int32)
    return Graph(ops["feats"], opcode, kernel, kernels, edges.source, edges.target)


def activation(name: str):
    """TensorFlow's function of that name; leaky ReLU has slope 0.2."""
    return tf.identity if name == "linear" else getattr(tf.nn, name)


class Dense(tf.keras.layers.Layer):
    """x kernel + bias in the precision of x: float32 when training, float64 when a kernel is ranked."""

    def __init__(self, width: int) -> None:
        super().__init__(autocast=False)
        self._width = width

    def build(self, shape: tf.TensorShape) -> None:
        penalty = tf.keras.regularizers.l2(REGULARISATION)
        self.kernel = self.add_weight("kernel", [shape[-1], self._width], tf.float32, "glorot_uniform", penalty)
        self.bias = self.add_weight("bias", [self._width], tf.float32, "zeros")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return tf.tensordot(x, tf.cast(self.kernel, x.dtype), 1) + tf.cast(self.bias, x.dtype)


class Embedding(tf.keras.layers.Layer):
    """One learned row per opcode."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(autocast=False, activity_regularizer=tf.keras.regularizers.l2(REGULARISATION))
        self.table = self.add_weight("table", [rows, width], tf.float32, tf.keras.initializers.RandomUniform())

    def call(self, index: tf.Tensor) -> tf.Tensor:
        return tf.gather(self.table, index)


class Stack(tf.keras.layers.Layer):
    """Dense layers with the activation between them, and none after the last."""

    def __init__(self, widths: list[int], hidden_activation: str) -> None:
        super().__init__(autocast=False)
        self._activation = activation(hidden_activation)
        self._dense = [Dense(width) for width in widths]

    def call(self, x: tf.Tensor) -> tf.Tensor:
        for depth, layer in enumerate(self._dense):
            x = layer(self._activation(x) if depth else x)
        return x


def with_configs(x: tf.Tensor, configs: tf.Tensor) -> tf.Tensor:
    """Rows (R, A) beside configurations (R, C, B): (R, C, A + B)."""
    repeated = tf.repeat(x[:, tf.newaxis], tf.shape(configs)[1], axis=1)
    return tf.concat([repeated, configs], axis=-1)


class TileModel(tf.keras.Model):
    """A model with the grader's interface. `score` does the work: (K, C, D) configurations to (K, C) scores.

    A `precise` model ranks in float64 and rounds its scores to 1e-9. Two configurations that the model cannot tell
    apart then tie exactly and keep their order, and two that it can never change places through rounding.
    """

    precise = False

    def __init__(self, num_configs: int, num_ops: int = OPCODES, op_embed_dim: int = 32) -> None:
        super().__init__()
        self._num_configs = num_configs
        self._embedding = Embedding(OPCODES, op_embed_dim)

    def call(self, graph: tfgnn.GraphTensor, training: bool = False) -> tf.Tensor:
        return self.forward(graph, self._num_configs)

    def forward(self, graph: tfgnn.GraphTensor, num_configs: int) -> tf.Tensor:
        """Scores of shape (kernels, num_configs), lower = faster."""
        parts = read_graph(graph)
        configs = graph.node_sets["config"]["feats"]
        if tf.executing_eagerly() and parts.kernels == 1:
            return self._rank(parts, configs)[tf.newaxis]
        return self.score(parts, tf.reshape(configs, [parts.kernels, -1, configs.shape[-1]]))

    def score(self, graph: Graph, configs: tf.Tensor) -> tf.Tensor:
        raise NotImplementedError

    def node_inputs(self, graph: Graph) -> tf.Tensor:
        """(N, F + E): features and opcode embedding."""
        return tf.concat([graph.feats, tf.cast(self._embedding(graph.opcode), graph.feats.dtype)], axis=-1)

    def _rank(self, graph: Graph, configs: tf.Tensor) -> tf.Tensor:
        """Scores of all configurations of one kernel, a bounded number at a time."""
        if self.precise:
            graph, configs = graph._replace(feats=tf.cast(graph.feats, tf.float64)), tf.cast(configs, tf.float64)
        step = max(1, ELEMENTS_AT_ONCE // max(1, 64 * int(graph.nodes)))
        starts = range(0, max(1, int(tf.shape(configs)[0])), step)
        scores = tf.concat([self.score(graph, configs[tf.newaxis, i : i + step])[0] for i in starts], axis=0)
        return tf.round(scores * 1e9) / 1e9 if self.precise else scores


class MLP(TileModel):
    """Sums of node features and opcode embeddings, joined with the configuration."""

    precise = True

    def __init__(
        self,
        num_configs: int,
        num_ops: int = OPCODES,
        op_embed_dim: int = 32,
        mlp_layers: int = 2,
        hidden_activation: str = "leaky_relu",
        hidden_dim: int = 64,
        reduction: str = "sum",
    ) -> None:
        super().__init__(num_configs, num_ops, op_embed_dim)
        self._reduction = reduction
        self._head = Stack([hidden_dim] * mlp_layers + [1], hidden_activation)

    def score(self, graph: Graph, configs: tf.Tensor) -> tf.Tensor:
        pooled = graph.pool(self.node_inputs(graph), self._reduction)
        return tf.squeeze(self._head(with_configs(pooled, configs)), -1)


class _Join(TileModel):
    """Where the configuration meets the graph: `early`, at every node, or late, at the pooled vector."""

    precise = True
    early = False

    def score(self, graph: Graph, configs: tf.Tensor) -> tf.Tensor:
        x = self.node_inputs(graph)  # (N, F + E)
        if self.early:
            x = with_configs(x, tf.gather(configs, graph.kernel))  # (N, C, F + E + D)
        pooled = self.encode(graph, x)
        return tf.squeeze(self._head(pooled if self.early else with_configs(pooled, configs)), -1)

    def encode(self, graph: Graph, x: tf.Tensor) -> tf.Tensor:
        raise NotImplementedError


class _SAGE(_Join):
    """Each layer x ← l2_normalize(act(W [(A + Aᵀ)x, x] + b))."""

    def __init__(
        self,
        num_configs: int,
        num_ops: int = OPCODES,
        num_gnns: int = 3,
        final_mlp_layers: int = 2,
        hidden_activation: str = "leaky_relu",
        hidden_dim: int = 64,
        op_embed_dim: int = 64,
    ) -> None:
        super().__init__(num_configs, num_ops, op_embed_dim)
        self._activation = activation(hidden_activation)
        self._gnn = [Dense(hidden_dim) for _ in range(num_gnns)]
        self._head = Stack([hidden_dim] * final_mlp_layers + [1], hidden_activation)

    def encode(self, graph: Graph, x: tf.Tensor) -> tf.Tensor:
        for layer in self._gnn:
            near = graph.from_consumers(x) + graph.from_producers(x)
            x = tf.nn.l2_normalize(self._activation(layer(tf.concat([near, x], axis=-1))), axis=-1)
        return graph.pool(x, "sum")


class _ResGCN(_Join):
    """Each layer y = act(x), x ← x + MLP(Ây + Âᵀy + y) with Â = A + I over its row sums; directed: one MLP each."""

    def __init__(
        self,
        num_configs: int,
        num_ops: int = OPCODES,
        num_gnns: int = 3,
        mlp_layers: int = 2,
        hidden_activation: str = "leaky_relu",
        hidden_dim: int = 64,
        op_embed_dim: int = 32,
        directed: bool = False,
        reduction: str = "sum",
    ) -> None:
        super().__init__(num_configs, num_ops, op_embed_dim)
        self._activation, self._directed, self._reduction = activation(hidden_activation), directed, reduction
        self._prenet = Stack([hidden_dim] * 2, hidden_activation)
        stacks = num_gnns * (3 if directed else 1)
        self._gnn = [Stack([hidden_dim] * mlp_layers, hidden_activation) for _ in range(stacks)]
        self._head = Stack([hidden_dim, 1], hidden_activation)

    def encode(self, graph: Graph, x: tf.Tensor) -> tf.Tensor:
        ones = tf.ones_like(graph.feats[:, :1])
        share = 1.0 / (graph.from_consumers(ones)[:, 0] + 1.0)  # (N,)
        share = tf.reshape(share, [-1] + [1] * (len(x.shape) - 1))
        x = self._prenet(x)
        for depth in range(0, len(self._gnn), 3 if self._directed else 1):
            y = self._activation(x)
            outward = share * (graph.from_consumers(y) + y)
            inward = graph.from_producers(share * y) + share * y
            if self._directed:
                parts = (outward, inward, y)
                x = x + tf.add_n([self._gnn[depth + i](part) for i, part in enumerate(parts)])
            else:
                x = x + self._gnn[depth](outward + inward + y)
        return graph.pool(self._activation(x), self._reduction)


class LateJoinSAGE(_SAGE):
    """GraphSAGE over the nodes; configurations are joined to the pooled graph."""


class EarlyJoinSAGE(_SAGE):
    """GraphSAGE over the nodes, each joined with the configuration."""

    early = True


class LateJoinResGCN(_ResGCN):
    """Residual GCN over the nodes; configurations are joined to the pooled graph."""


class EarlyJoinResGCN(_ResGCN):
    """Residual GCN over the nodes, each joined with the configuration."""

    early = True


# tilewise's reading of TPU tiles, set by `keras_runs.py`; a hand-in holds a copy of it below (`handin.py`).
tpu_tiles = None


class RankerFeatures:
    """What TileRanker reads, in NumPy: sizes and tiles as logarithms, and how each tile cuts each dimension.

    The graph comes scaled to [0, 1] with constant columns dropped; `low` and `high` undo that. Whole numbers come back
    exactly, which is what tells whether a tile divides a size. The tables were fitted when the model was trained; `low`
    and `high` are those of the data that the grader scales by, where `make handin` found it. Columns that such data
    do not have are at their smallest value in training (`config_rest`).
    """

    ROOT, TYPES, SHAPE, WINDOW, STRIDE = 0, slice(2, 21), slice(21, 27), slice(37, 39), slice(45, 47)
    MINOR = 134  # the dimension that lies together in memory
    HEAVY, PARAMETER = (26, 34, 72, 70), 63  # convolution, dot, reduce-window, reduce
    BYTES = (4, 1, 1, 4, 4, 8, 1, 4, 4, 8, 2, 4, 8, 2, 4, 4, 4, 4, 4)  # of an element, by type

    def __init__(self, tables: dict[str, list]) -> None:
        self._tables = {name: np.asarray(values) for name, values in tables.items()}

    def __getattr__(self, name: str) -> np.ndarray:
        try:
            return self.__dict__["_tables"][name]
        except KeyError as error:
            raise AttributeError(name) from error

    def apply(
        self, node: np.ndarray, opcode: np.ndarray, edges: np.ndarray, config: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(N, F) node inputs, (G,) kernel inputs and (C, D) configuration inputs."""
        node = unscaled(node, self.node_low, self.node_high)
        config = unscaled(config, self.config_low, self.config_high).astype(np.float64)
        rest = self._tables.get("config_rest", np.zeros(0))[config.shape[1] :]
        config = np.hstack([config, np.tile(rest, (len(config), 1))])
        written, node = node, node.copy()
        # Columns that were constant in training say nothing, as in tilewise.
        constant = self._tables.get("node_constant", np.zeros((0, 2)))
        node[:, constant[:, 0].astype(np.int64)] = constant[:, 1]
        summary = self._summary(node, opcode, edges)
        if len(self._tables.get("tile_columns", ())):
            wide, raw = self._tpu(written, opcode, edges, config)
            heavy = self._reading.node
        else:
            sizes = self._sizes(node, opcode, edges)
            heavy = self._heaviest(node, opcode, edges, len(node) - 1)
            wide = log(sizes[self.sizes.astype(np.int64)])
            element = self.BYTES[int(np.argmax(written[0, self.TYPES]))]
            filling = self._filling(written, opcode, sizes, config, element)
            raw = np.hstack([self._cuts(sizes, config), filling])
        wide = np.concatenate([wide, summary, node[heavy, self.TYPES]])
        wide = (as_float32(wide) - as_float32(self.global_centre)) * as_float32(self.global_scale)
        own = (as_float32(raw) - as_float32(self.config_centre)) * as_float32(self.config_scale)
        columns = log(node[:, self.node_kept.astype(np.int64)])
        nodes = (as_float32(columns) - as_float32(self.node_centre)) * as_float32(self.node_scale)
        return tuple(np.clip(part, np.float32(-8.0), np.float32(8.0)) for part in (nodes, wide, own))

    def _tpu(
        self, node: np.ndarray, opcode: np.ndarray, edges: np.ndarray, config: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """What the tile bounds of a TPU kernel mean, by tilewise's own code: inputs of the kernel and of each tile."""
        self._reading = tpu_tiles.read_tiles(node, opcode, edges, config)
        columns = self.tile_columns.astype(np.int64)
        wide = tpu_tiles.tile_kernel_features(self._reading, node)
        return wide, tpu_tiles.tile_features(self._reading, config)[columns].T

    def _heaviest(self, node: np.ndarray, opcode: np.ndarray, edges: np.ndarray, root: int) -> int:
        """The operation with the most work: that of a product is the root of the product of its three volumes."""
        candidates = [int(n) for n in np.flatnonzero(np.isin(opcode, self.HEAVY))]

        def work(index: int) -> tuple[float, float, int]:
            rows = [index, *edges[edges[:, 0] == index][:2, 1].tolist()]
            volumes = np.log2(np.maximum(node[rows, self.SHAPE].astype(np.float64), 1)).sum(axis=1)
            kind = self.HEAVY.index(int(opcode[index]))
            return round(float(volumes.sum() / 2 if kind < 2 else volumes.max()), 6), float(volumes[0]), -kind

        return max(candidates, key=work) if candidates else root

    def _sizes(self, node: np.ndarray, opcode: np.ndarray, edges: np.ndarray) -> np.ndarray:
        """Root, heaviest operation and its first two operands (six sizes each), its window and stride."""
        roots = np.flatnonzero(node[:, self.ROOT] > 0)
        root = int(roots[-1]) if len(roots) else len(node) - 1
        heavy = self._heaviest(node, opcode, edges, root)
        operands = edges[edges[:, 0] == heavy][:2, 1]
        rows = [node[root, self.SHAPE], node[heavy, self.SHAPE], *(node[v, self.SHAPE] for v in operands)]
        rows += [np.zeros(6, np.float32)] * (4 - len(rows))
        return np.concatenate([*rows, node[heavy, self.WINDOW], node[heavy, self.STRIDE]]).astype(np.float64)

    def _summary(self, node: np.ndarray, opcode: np.ndarray, edges: np.ndarray) -> np.ndarray:
        volume = np.maximum(node[:, self.SHAPE].astype(np.float64), 1).prod(axis=1)
        parameters = opcode == self.PARAMETER
        volumes = (len(node), len(edges), volume[parameters].sum(), volume.max(), volume.sum())
        return np.array([*(log(v) for v in volumes), float(parameters.sum())])

    def _cuts(self, sizes: np.ndarray, config: np.ndarray) -> np.ndarray:
        config = config.astype(np.float32)
        steps, pairs = self.steps.reshape(-1, 2), self.pairs.reshape(-1, 2).astype(np.int64)
        tile = np.maximum(np.abs(config[:, pairs[:, 0]]), np.float32(1))
        size = as_float32(np.maximum(sizes[pairs[:, 1]], 1.0))
        tiles = np.ceil(size / tile)
        padding = np.minimum(tile * tiles / size, np.float32(64))
        reached = config[:, steps[:, 0].astype(np.int64)] >= as_float32(steps[:, 1])
        return np.hstack([log(config[:, self.columns.astype(np.int64)]), reached, np.log2(tiles), np.log2(padding)])

    def _filling(
        self, node: np.ndarray, opcode: np.ndarray, sizes: np.ndarray, config: np.ndarray, element: int
    ) -> np.ndarray:
        """How each configuration would fill a GPU: programs, waves, what the last one wastes; nothing elsewhere."""
        if len(self._tables.get("gpu", ())) not in (4, 5):
            return np.zeros((len(config), 0))
        processors, shared = self.gpu[:2]
        told_of_loads = int(self.gpu[4]) if len(self.gpu) == 5 else 0
        root, heavy, first, second = (sizes[6 * i : 6 * i + 6] for i in range(4))
        kernel, output, entry = (config[:, 8 * i : 8 * i + 6] for i in range(3))
        is_product = bool(np.isin(opcode, self.HEAVY[:2]).any())
        programs = tiles(root if is_product else heavy, output)
        if is_product:
            place = max(int((second > 0).sum()) - 2, 0)
            steps = np.ceil(max(second[place], 1.0) / np.maximum(kernel[:, place], 1.0))
        else:
            steps = tiles(max(first, second, key=lambda size: float(size.sum())), entry) / programs
        bounds = config[:, 15 if is_product else 23]
        warps, stages = (np.maximum(config[:, int(column)], 1.0) for column in self.gpu[2:4])
        along = self._along(node, opcode, (root, first, second)) if told_of_loads > 1 else None
        widths = [load_bytes(size, element, along and along[i]) for i, size in enumerate((root, first, second))]
        ahead = [stages if told_of_loads < 2 or width >= 4 else 1.0 for width in widths[1:]]  # else nothing is copied
        staged = (config[:, 23] * ahead[0] + config[:, 7] * ahead[1]) * element if is_product else np.ones(len(config))
        a_thread = np.maximum(bounds / (32 * warps), 1e-3)
        resident = np.minimum(np.floor(shared / np.maximum(staged, 1)), np.floor(64 / warps))
        resident = np.clip(np.minimum(resident, np.floor(65536 / ((a_thread + 40.0) * 32 * warps))), 1, 32)
        alone = programs / processors
        waves = alone / resident
        whole = np.ceil(waves)
        wasted = np.minimum(whole / waves, 16.0), np.minimum(np.ceil(alone) / alone, 16.0)
        rounds = steps * whole * resident
        through = np.maximum(bounds * rounds, 1.0)
        columns = [programs, whole, *wasted, resident, a_thread, np.maximum(steps, 1e-3), through, staged]
        if told_of_loads:  # how wide the loads from each tensor's rows may be
            columns += [np.full(len(config), width) for width in widths]
        if told_of_loads > 1:  # how many there are, and how much of a tile lies together
            operands = 1 if is_product or float(first.sum()) >= float(second.sum()) else 2
            tiles_read = [(config[:, 23], widths[operands])]
            tiles_read += [(config[:, 7], widths[2]), (config[:, 15], widths[0])] if is_product else []
            issued = [np.maximum(tile / warps * (element / 32 / width), 1.0) for tile, width in tiles_read]
            issued += [np.ones(len(config))] * (3 - len(issued))
            loads = (issued[0] + issued[1] if is_product else issued[0]) * warps
            other = kernel[:, along[2]] if is_product else np.zeros(len(config))
            together = [np.maximum(tile * element, 1.0) for tile in (entry[:, along[operands]], other)]
            columns += [*issued, np.maximum(loads * rounds, 1.0), *together]
        if told_of_loads > 2:  # what is touched beside, where rows do not begin with a line of memory
            tensors = (root, along[0]), (second if operands == 2 else first, along[operands]), (second, along[2])
            begin = [boundary(float(size[place]) * element) for size, place in tensors]
            nothing = np.full(len(config), np.inf)
            runs = [np.maximum(output[:, along[0]] * element, 1.0), together[0], together[1] if is_product else nothing]
            columns += [1.0 + (128 - start) / run for start, run in zip(begin, runs, strict=True)]
            columns += [1.0 + max(32 - start, 0) / run for start, run in zip(begin[1:], runs[1:], strict=True)]
        return np.log2(np.stack(columns, axis=1))

    def _along(self, node: np.ndarray, opcode: np.ndarray, tensors: tuple[np.ndarray, ...]) -> list[int]:
        """The dimension of the root and of both operands that lies together in memory."""
        along = [max(int((size > 0).sum()) - 1, 0) for size in tensors]
        for place, argument in enumerate(np.flatnonzero(opcode == self.PARAMETER)[:2], 1):
            if tensors[place].any() and (node[argument, self.SHAPE] == tensors[place]).all():
                along[place] = int(node[argument, self.MINOR])
        return along


def tiles(size: np.ndarray, tile: np.ndarray) -> np.ndarray:
    """How many tiles cover a tensor; dimensions that either does not have count once."""
    cut = (size[np.newaxis] > 0) & (tile > 0)
    return np.where(cut, np.ceil(size / np.maximum(tile, 1)), 1.0).prod(axis=1)


def load_bytes(size: np.ndarray, element: int, along: int | None = None) -> float:
    """The widest load that starts at every row of a tensor; rows are along its last dimension unless told."""
    if not (size > 0).any():
        return 16.0
    last = int(size[size > 0][-1]) if along is None else int(size[along])
    return float(min((last & -last) * element, 16)) if last else 16.0


def boundary(row: float) -> int:
    """The largest power of two, up to a line of memory, at whose multiples all rows of so many bytes begin."""
    return min(int(row) & -int(row), 128) if int(row) else 128


def log(x: np.ndarray) -> np.ndarray:
    """log2(1 + |x|) with the sign of x; in float32 where x is."""
    x = np.asarray(x)
    x = x if x.dtype == np.float32 else x.astype(np.float64)
    return np.copysign(np.log2(np.abs(x) + 1), x)


def as_float32(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, dtype=np.float32)


def unscaled(scaled: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The original columns: those that varied from `scaled`, the others at their constant value.

    Data that vary in other columns than those the ranges were taken from cannot be undone. They are read in order, as
    far as both go, and kept within the ranges: a guess that ranks, where an error would hand in nothing.
    """
    varied = np.flatnonzero(high > low)
    columns = np.tile(low, (len(scaled), 1)).astype(np.float64)
    if scaled.shape[1] != len(varied):
        varied = varied[: scaled.shape[1]]
        scaled = np.clip(scaled[:, : len(varied)], 0.0, 1.0)
    columns[:, varied] = scaled.astype(np.float64) * (high[varied] - low[varied]) + low[varied]
    whole = np.round(columns)
    near = np.abs(columns - whole) <= 1e-6 * np.maximum(1.0, np.abs(whole))
    return np.where(near, whole, columns).astype(np.float32)


class Weight(tf.keras.layers.Layer):
    """A bare variable that is multiplied in."""

    def __init__(self, shape: list[int]) -> None:
        super().__init__(autocast=False)
        self.value = self.add_weight("value", shape, tf.float32, "ones")

    def call(self, dtype: tf.DType) -> tf.Tensor:
        return tf.cast(self.value, dtype)


class TileRanker(TileModel):
    """The graph is encoded once, and every configuration is then judged against that encoding.

    Trained with PyTorch and brought here by `make handin`, with the tables of its features among the arguments.
    """

    precise = True

    def __init__(
        self,
        num_configs: int,
        num_ops: int = OPCODES,
        *,
        features: dict[str, list],
        hidden_dim: int,
        node_dim: int,
        op_embed_dim: int,
        num_gnns: int,
        num_blocks: int,
        members: int,
        linear: int = 0,
    ) -> None:
        super().__init__(num_configs, num_ops, op_embed_dim)
        self._features = RankerFeatures(features)
        self._widths = tuple(len(features[name]) for name in ("node_centre", "global_centre", "config_centre"))
        self._node_in = Dense(node_dim)
        self._gnn = [Dense(node_dim) for _ in range(num_gnns)]
        self._kernel_in = Dense(hidden_dim)
        self._config_in = Dense(hidden_dim)
        self._scaling = Weight([members, 1, self._widths[2]])
        self._film = [Dense(2 * hidden_dim) for _ in range(num_blocks)]
        self._blocks = [Dense(hidden_dim) for _ in range(num_blocks)]
        self._query, self._key, self._value = Dense(node_dim), Dense(node_dim), Dense(hidden_dim)
        self._out = Weight([members, hidden_dim, 1])
        self._linear = Weight([self._widths[2]]) if linear else None

    def score(self, graph: Graph, configs: tf.Tensor) -> tf.Tensor:
        if graph.kernels != 1:
            raise NotImplementedError("TileRanker is trained with PyTorch; here it ranks one kernel at a time.")
        node, wide, own = self._inputs(graph, configs[0])
        nodes = self._encode_nodes(graph, node)
        kernel = self._encode_kernel(nodes, wide)
        h = tf.nn.relu(self._config_in(own * self._scaling(own.dtype)) + kernel)  # (members, C, H)
        keys = self._key(nodes)
        logits = tf.tensordot(self._query(h), keys, [[2], [1]]) / math.sqrt(keys.shape[-1])
        h += tf.tensordot(tf.nn.softmax(logits), self._value(nodes), 1)
        for film, block in zip(self._film, self._blocks, strict=True):
            scale, shift = tf.split(film(kernel), 2, axis=-1)
            h += tf.nn.relu(block(h) * (1.0 + scale) + shift)
        scores = tf.reduce_mean(tf.squeeze(tf.matmul(h, self._out(h.dtype)), -1), axis=0, keepdims=True)
        return scores if self._linear is None else scores + tf.reduce_sum(own * self._linear(own.dtype), -1)[tf.newaxis]

    def _inputs(self, graph: Graph, configs: tf.Tensor) -> list[tf.Tensor]:
        """The features, from whatever precision the graph has, in that precision."""
        edges = tf.stack([tf.cast(graph.consumer, tf.int64), tf.cast(graph.producer, tf.int64)], axis=1)
        arguments = [tf.cast(graph.feats, tf.float32), graph.opcode, edges, tf.cast(configs, tf.float32)]
        parts = tf.numpy_function(self._features.apply, arguments, [tf.float32] * 3, stateful=False)
        shapes = [None, self._widths[0]], [self._widths[1]], [None, self._widths[2]]
        for part, shape in zip(parts, shapes, strict=True):
            part.set_shape(shape)
        return [tf.cast(part, graph.feats.dtype) for part in parts]

    def _encode_nodes(self, graph: Graph, node: tf.Tensor) -> tf.Tensor:
        x = tf.concat([node, tf.cast(self._embedding(graph.opcode), node.dtype)], axis=-1)
        x = tf.nn.relu(self._node_in(x))
        share = 1.0 / (graph.from_consumers(tf.ones_like(x[:, :1])) + 1.0)
        for layer in self._gnn:
            outward = share * (graph.from_consumers(x) + x)
            inward = graph.from_producers(share * x) + share * x
            x += tf.nn.relu(layer(tf.concat([outward, inward], axis=-1)))
        return x  # (N, node_dim)

    def _encode_kernel(self, nodes: tf.Tensor, wide: tf.Tensor) -> tf.Tensor:
        total, count = tf.reduce_sum(nodes, axis=0), tf.cast(tf.shape(nodes)[0], nodes.dtype)
        return tf.nn.relu(
            self._kernel_in(tf.concat([total / count, total / tf.sqrt(count), wide], axis=-1)[tf.newaxis])
        )
