"""Prepares a layout graph for a model: scaled node features, in segments of bounded size.

Preparation has three steps. Nodes more than `hops` edges from every configurable node are removed: after as many layers
their encoding is the same under every configuration. The remaining nodes are divided into consecutive segments of at
most `segment_nodes` nodes; the files list nodes in topological order, so most neighbours stay together. Edges between
segments are dropped. A segment is then a small graph whose memory does not depend on the size of the program (compare
Cao et al. 2023, "Large Graph Property Prediction via Graph GraphSegment Training").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.schema import DIMENSIONS, NODE_COLUMN
from tilewise.costmodel.layout.graph import LayoutGraph
from tilewise.errors import ConfigurationError, FileFormatError

Floats = npt.NDArray[np.float32]
_MAX_SCALED = 8.0  # scaled features are clipped: a column that hardly varies in training may take any value elsewhere
_SHAPE_COLUMN = NODE_COLUMN["shape_dimensions_0"]


@dataclass(frozen=True, eq=False)
class GraphSegment:
    """A part of a graph with s nodes, p of which are configurable."""

    node: Floats  # (s, F)
    opcode: npt.NDArray[np.int64]  # (s,)
    sizes: Floats  # (p, 6): logarithms of the dimensions of the configurable nodes' results
    share: Floats  # (s,): share of each node in the elements of the whole graph
    edges: npt.NDArray[np.int64]  # (m, 2) within the segment
    config_nodes: npt.NDArray[np.int64]  # (p,): indices of the configurable nodes in the segment
    columns: npt.NDArray[np.int64]  # (p,): their positions in the graph's `config_feat`
    graph_nodes: int  # number of nodes in all segments of the graph


@dataclass(frozen=True, eq=False)
class Scaling:
    """Standardizes the logarithms of node features to mean 0 and deviation 1; constant columns are dropped."""

    mean: Floats
    deviation: Floats

    @classmethod
    def fit(cls, graphs: Iterable[LayoutGraph]) -> Scaling:
        """Compute mean and deviation over the nodes of all graphs, with one graph in memory at a time."""
        count, total, squares = 0, 0.0, 0.0
        for graph in graphs:
            # float64 sums: the difference of two large sums of squares loses most digits of float32.
            logs = _signed_log(graph.node_feat).astype(np.float64)
            count, total, squares = count + len(logs), total + logs.sum(axis=0), squares + np.square(logs).sum(axis=0)
        if not count:
            raise ConfigurationError("The train split is empty, so feature ranges cannot be taken from it.")
        mean = np.asarray(total / count)
        variance = np.asarray(squares / count) - mean**2
        # Rounding leaves a tiny variance in constant columns, possibly a negative one.
        deviation = np.sqrt(np.where(variance > 1e-9, variance, 0.0))
        return cls(mean.astype(np.float32), deviation.astype(np.float32))

    @classmethod
    def restore(cls, tensors: Mapping[str, npt.NDArray[Any]]) -> Scaling:
        """Build a scaling from the tensors of a model file."""
        arrays = [tensors.get(name) for name in ("mean", "deviation")]
        width = len(NODE_COLUMN)
        if any(array is None or array.shape != (width,) or array.dtype != np.float32 for array in arrays):
            raise FileFormatError("The model file lacks the feature ranges of its scaling.")
        return cls(*(array for array in arrays if array is not None))

    @property
    def width(self) -> int:
        return int((self.deviation > 0).sum())

    def tensors(self) -> dict[str, Floats]:
        """Return the tensors that a model file stores."""
        return {"mean": self.mean, "deviation": self.deviation}

    def apply(self, node_feat: npt.NDArray[Any]) -> Floats:
        """Scale node features (n, 140) to (n, width)."""
        varies = self.deviation > 0
        scaled = (_signed_log(node_feat[:, varies]) - self.mean[varies]) / self.deviation[varies]
        return np.asarray(np.clip(scaled, -_MAX_SCALED, _MAX_SCALED))


def _signed_log(values: npt.NDArray[Any]) -> Floats:
    return np.asarray(np.sign(values) * np.log1p(np.abs(values)), dtype=np.float32)


def split_graph(graph: LayoutGraph, scaling: Scaling, hops: int, segment_nodes: int) -> list[GraphSegment]:
    """Divide the nodes within `hops` of a configurable node into segments of at most `segment_nodes` nodes."""
    nodes = np.flatnonzero(within_hops(graph, hops))
    share = node_shares(graph.node_feat[nodes])
    # Renumber the nodes: their index among the selected ones, or -1.
    index_of = np.full(graph.n_nodes, -1, np.int64)
    index_of[nodes] = np.arange(len(nodes))
    edges, config_nodes = index_of[graph.edge_index], index_of[graph.config_ids]
    edges = edges[(edges >= 0).all(axis=1)]
    # Drop edges between segments.
    edges = edges[edges[:, 0] // segment_nodes == edges[:, 1] // segment_nodes]
    segments = []
    for start in range(0, len(nodes), segment_nodes):
        stop = min(start + segment_nodes, len(nodes))
        columns = np.flatnonzero((config_nodes >= start) & (config_nodes < stop))
        local_nodes = config_nodes[columns] - start
        node_feat = np.asarray(graph.node_feat[nodes[start:stop]])
        shapes = node_feat[local_nodes, _SHAPE_COLUMN : _SHAPE_COLUMN + DIMENSIONS]
        segments.append(
            GraphSegment(
                node=scaling.apply(node_feat),
                opcode=graph.node_opcode[nodes[start:stop]].astype(np.int64),
                sizes=np.log2(1.0 + np.maximum(shapes, 0.0)).astype(np.float32),
                share=share[start:stop],
                edges=edges[(edges[:, 0] >= start) & (edges[:, 0] < stop)] - start,
                config_nodes=local_nodes,
                columns=columns,
                graph_nodes=len(share),
            )
        )
    return segments


def within_hops(graph: LayoutGraph, hops: int) -> npt.NDArray[np.bool_]:
    """Return which nodes are at most `hops` edges, in either direction, from a configurable node: (n,)."""
    reached = np.zeros(graph.n_nodes, bool)
    reached[graph.config_ids] = True
    consumer, producer = np.asarray(graph.edge_index).T
    for _ in range(hops):
        wider = reached.copy()
        wider[producer[reached[consumer]]] = True
        wider[consumer[reached[producer]]] = True
        # Stop when nothing new is reached: an untrusted model file may ask for any number of hops.
        if np.array_equal(wider, reached):
            break
        reached = wider
    return reached


def node_shares(node_feat: npt.NDArray[Any]) -> Floats:
    """Return each node's share of all elements that the nodes produce: (n,)."""
    # Products may have wrapped to negative numbers in the files.
    elements = np.maximum(node_feat[:, NODE_COLUMN["shape_dimensions_product"]].astype(np.float64), 0.0)
    total = elements.sum()
    return np.asarray(elements / total if total > 0 else np.full(len(elements), 1 / len(elements)), dtype=np.float32)
