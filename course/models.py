"""The models to hand in, as Keras classes: the five baselines, for the course's grader and for training in Keras.

This file stands alone (TensorFlow, TF-GNN and NumPy), because the grader puts it in the place of its own. A model reads
a `GraphTensor` whose features are scaled already and gives one score per configuration, lower = faster. The opcode
table always has 121 rows, whatever `num_ops` the data suggest, so that the variables fit every collection.

To write your own: derive from `TileModel`, build the layers in `__init__`, and define `score(graph, configs)`; then
train it with `python tiles_train.py --framework=keras --model=YourClass`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

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


def dense(width: int) -> tf.keras.layers.Dense:
    return tf.keras.layers.Dense(width, kernel_regularizer=tf.keras.regularizers.l2(REGULARISATION))


class Stack(tf.keras.layers.Layer):
    """Dense layers with the activation between them, and none after the last."""

    def __init__(self, widths: list[int], hidden_activation: str) -> None:
        super().__init__()
        self._activation = activation(hidden_activation)
        self._dense = [dense(width) for width in widths]

    def call(self, x: tf.Tensor) -> tf.Tensor:
        for depth, layer in enumerate(self._dense):
            x = layer(self._activation(x) if depth else x)
        return x


def with_configs(x: tf.Tensor, configs: tf.Tensor) -> tf.Tensor:
    """Rows (R, A) beside configurations (R, C, B): (R, C, A + B)."""
    repeated = tf.repeat(x[:, tf.newaxis], tf.shape(configs)[1], axis=1)
    return tf.concat([repeated, configs], axis=-1)


class TileModel(tf.keras.Model):
    """A model with the grader's interface. `score` does the work: (K, C, D) configurations to (K, C) scores."""

    def __init__(self, num_configs: int, num_ops: int = OPCODES, op_embed_dim: int = 32) -> None:
        super().__init__()
        self._num_configs = num_configs
        self._embedding = tf.keras.layers.Embedding(
            OPCODES, op_embed_dim, activity_regularizer=tf.keras.regularizers.l2(REGULARISATION)
        )

    def call(self, graph: tfgnn.GraphTensor, training: bool = False) -> tf.Tensor:
        return self.forward(graph, self._num_configs)

    def forward(self, graph: tfgnn.GraphTensor, num_configs: int) -> tf.Tensor:
        """Scores of shape (kernels, num_configs), lower = faster."""
        parts = read_graph(graph)
        configs = graph.node_sets["config"]["feats"]
        if tf.executing_eagerly() and parts.kernels == 1:
            return self._rank_one(parts, configs)[tf.newaxis]
        return self.score(parts, tf.reshape(configs, [parts.kernels, -1, configs.shape[-1]]))

    def score(self, graph: Graph, configs: tf.Tensor) -> tf.Tensor:
        raise NotImplementedError

    def node_inputs(self, graph: Graph) -> tf.Tensor:
        """(N, F + E): features and opcode embedding."""
        return tf.concat([graph.feats, self._embedding(graph.opcode)], axis=-1)

    def _rank_one(self, graph: Graph, configs: tf.Tensor) -> tf.Tensor:
        """Scores of all configurations of one kernel, a bounded number at a time; repeats share one score."""
        rows, index = tf.raw_ops.UniqueV2(x=configs, axis=[0])
        step = max(1, ELEMENTS_AT_ONCE // max(1, 64 * int(graph.nodes)))
        pieces = math.ceil(int(tf.shape(rows)[0]) / step)
        scores = [self.score(graph, rows[tf.newaxis, i * step : (i + 1) * step])[0] for i in range(pieces)]
        return tf.gather(tf.concat(scores, axis=0), index)


class MLP(TileModel):
    """Sums of node features and opcode embeddings, joined with the configuration."""

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
        self._gnn = [dense(hidden_dim) for _ in range(num_gnns)]
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
