"""Kernels as the `GraphTensor`s that the course's grader and its models read, built from tilewise's reader.

Node sets ``op``, ``config`` and ``g`` (one node a kernel, with its id); edge sets ``feed`` (source = consumer, target =
producer), ``g_op`` and ``g_config``. Features are min-max scaled with constant columns dropped, as the grader does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf
import tensorflow_gnn as tfgnn

from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.features.scaling import MinMax


@dataclass(frozen=True)
class Slate:
    """A kernel and the configurations of it that go into a graph; None is all of them."""

    kernel: Kernel
    rows: np.ndarray | None = None

    @property
    def n_configs(self) -> int:
        return self.kernel.n_configs if self.rows is None else len(self.rows)

    @property
    def target(self) -> np.ndarray:
        """Runtime over the default's; zeros where the answers are withheld."""
        if not self.kernel.labelled:
            return np.zeros(self.n_configs, np.float32)
        target = self.kernel.target
        return (target if self.rows is None else target[self.rows]).astype(np.float32)


def graph_of(kernel: Kernel, scaling: MinMax) -> tfgnn.GraphTensor:
    """One kernel with all its configurations."""
    return merged_graph([Slate(kernel)], scaling)


def merged_graph(slates: Sequence[Slate], scaling: MinMax) -> tfgnn.GraphTensor:
    """Several kernels as the components of one graph."""
    parts = [scaling.apply(slate.kernel, slate.rows) for slate in slates]
    nodes = np.array([len(part.node) for part in parts], np.int32)
    edges = np.array([len(part.edges) for part in parts], np.int32)
    configs = np.array([len(part.config) for part in parts], np.int32)
    first = np.cumsum(nodes) - nodes
    feed = np.concatenate([part.edges.astype(np.int32) + start for part, start in zip(parts, first, strict=True)])
    normalizers = [s.kernel.normalizer if s.rows is None else s.kernel.normalizer[s.rows] for s in slates]
    return tfgnn.GraphTensor.from_pieces(
        node_sets={
            "op": tfgnn.NodeSet.from_fields(
                sizes=tf.constant(nodes),
                features={
                    "op": tf.constant(np.concatenate([part.opcode for part in parts]).astype(np.uint8)),
                    "feats": tf.constant(np.concatenate([part.node for part in parts])),
                },
            ),
            "config": tfgnn.NodeSet.from_fields(
                sizes=tf.constant(configs),
                features={
                    "feats": tf.constant(np.concatenate([part.config for part in parts])),
                    "runtimes": tf.constant(np.concatenate([slate.target for slate in slates])),
                    "normalizers": tf.constant(np.concatenate(normalizers).astype(np.int64)),
                },
            ),
            "g": tfgnn.NodeSet.from_fields(
                sizes=tf.ones([len(slates)], tf.int32),
                features={"tile_id": tf.constant([slate.kernel.name for slate in slates])},
            ),
        },
        edge_sets={
            "feed": _edge_set(edges, ("op", feed[:, 0]), ("op", feed[:, 1])),
            "g_op": _edge_set(nodes, ("g", np.repeat(np.arange(len(parts)), nodes)), ("op", np.arange(nodes.sum()))),
            "g_config": _edge_set(
                configs, ("g", np.repeat(np.arange(len(parts)), configs)), ("config", np.arange(configs.sum()))
            ),
        },
    )


def relaxed_spec(graph: tfgnn.GraphTensor) -> tfgnn.GraphTensorSpec:
    """The type of `graph` with any number of nodes, edges and configurations: one trace serves every batch."""
    return graph.spec.relax(num_nodes=True, num_edges=True)


def _edge_set(sizes: np.ndarray, source: tuple[str, np.ndarray], target: tuple[str, np.ndarray]) -> tfgnn.EdgeSet:
    ends = [(name, tf.constant(index.astype(np.int32))) for name, index in (source, target)]
    return tfgnn.EdgeSet.from_fields(
        sizes=tf.constant(sizes), adjacency=tfgnn.Adjacency.from_indices(source=ends[0], target=ends[1])
    )
