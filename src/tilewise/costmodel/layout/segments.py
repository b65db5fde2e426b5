"""A layout graph as a model reads it: scaled features of the nodes that matter, in segments of bounded size.

Three steps. Nodes farther than `hops` from every configurable node are left out: with as many layers, they look the
same under every configuration. What is left is cut into consecutive pieces of at most so many nodes (the files list
nodes in topological order, so most neighbours stay together) and edges between pieces are dropped. A piece is then a
small graph of its own, whose memory does not depend on the size of the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.schema import DIMENSIONS, NODE_COLUMN
from tilewise.costmodel.layout.graph import LayoutGraph
from tilewise.errors import ConfigurationError, FileFormatError

Floats = npt.NDArray[np.float32]
CACHE_BYTES = 256 << 20
_SIZES = NODE_COLUMN["shape_dimensions_0"]


@dataclass(frozen=True, eq=False)
class Segment:
    """A piece of a graph: s nodes, p of them configurable."""

    node: Floats  # (s, F)
    opcode: npt.NDArray[np.int64]  # (s,)
    sizes: Floats  # (p, 6): logarithms of the dimensions of the configurable nodes' results
    share: Floats  # (s,): what part of all bytes of the graph's nodes is this one's; the whole graph's sum to 1
    edges: npt.NDArray[np.int64]  # (m, 2) within the segment
    places: npt.NDArray[np.int64]  # (p,): which of the nodes are configurable
    columns: npt.NDArray[np.int64]  # (p,): where their configurations stand in the graph's
    graph_nodes: int  # in all segments of the graph

    @property
    def nbytes(self) -> int:
        arrays = (self.node, self.opcode, self.sizes, self.share, self.edges, self.places, self.columns)
        return sum(array.nbytes for array in arrays)


@dataclass(frozen=True, eq=False)
class Scaling:
    """Logarithms of node features, moved and scaled to mean 0 and deviation 1; columns always alike are dropped."""

    mean: Floats
    deviation: Floats

    @classmethod
    def fit(cls, graphs: Iterable[LayoutGraph]) -> Scaling:
        """One graph at a time is in memory."""
        count, total, squares = 0, 0.0, 0.0
        for graph in graphs:
            logs = _logs(graph.node_feat).astype(np.float64)
            count, total, squares = count + len(logs), total + logs.sum(axis=0), squares + np.square(logs).sum(axis=0)
        if not count:
            raise ConfigurationError("The train split is empty, so feature ranges cannot be taken from it.")
        mean = np.asarray(total / count)
        variance = np.asarray(squares / count) - mean**2
        deviation = np.sqrt(np.where(variance > 1e-9, variance, 0.0))
        return cls(mean.astype(np.float32), deviation.astype(np.float32))

    @classmethod
    def restore(cls, tensors: Mapping[str, npt.NDArray[Any]]) -> Scaling:
        found = [tensors.get(name) for name in ("mean", "deviation")]
        width = len(NODE_COLUMN)
        if any(array is None or array.shape != (width,) or array.dtype != np.float32 for array in found):
            raise FileFormatError("The model file lacks the feature ranges of its scaling.")
        return cls(*(array for array in found if array is not None))

    @property
    def width(self) -> int:
        return int((self.deviation > 0).sum())

    def tensors(self) -> dict[str, Floats]:
        return {"mean": self.mean, "deviation": self.deviation}

    def apply(self, node_feat: npt.NDArray[Any]) -> Floats:
        kept = self.deviation > 0
        scaled = (_logs(node_feat[:, kept]) - self.mean[kept]) / self.deviation[kept]
        return np.asarray(
            np.clip(scaled, -8.0, 8.0)
        )  # a column nearly constant in training may be anything in another graph


def _logs(values: npt.NDArray[Any]) -> Floats:
    return np.asarray(np.sign(values) * np.log1p(np.abs(values)), dtype=np.float32)


def cut(graph: LayoutGraph, scaling: Scaling, hops: int, segment_nodes: int) -> list[Segment]:
    """The segments of a graph."""
    kept = np.flatnonzero(near(graph, hops))
    share = node_shares(graph.node_feat[kept])
    place = np.full(graph.n_nodes, -1, np.int64)
    place[kept] = np.arange(len(kept))
    edges, ids = place[graph.edge_index], place[graph.config_ids]
    edges = edges[(edges >= 0).all(axis=1)]
    edges = edges[edges[:, 0] // segment_nodes == edges[:, 1] // segment_nodes]
    return [
        _segment(graph, scaling, kept[start : start + segment_nodes], start, edges, ids, share)
        for start in range(0, len(kept), segment_nodes)
    ]


def _segment(
    graph: LayoutGraph,
    scaling: Scaling,
    nodes: npt.NDArray[np.int64],
    start: int,
    edges: npt.NDArray[np.int64],
    ids: npt.NDArray[np.int64],
    share: Floats,
) -> Segment:
    stop = start + len(nodes)
    columns = np.flatnonzero((ids >= start) & (ids < stop))
    places = ids[columns] - start
    inside = edges[(edges[:, 0] >= start) & (edges[:, 0] < stop)]
    feat = np.asarray(graph.node_feat[nodes])
    return Segment(
        scaling.apply(feat),
        graph.node_opcode[nodes].astype(np.int64),
        np.log2(1.0 + np.maximum(feat[places, _SIZES : _SIZES + DIMENSIONS], 0.0)).astype(np.float32),
        share[start:stop],
        inside - start,
        places,
        columns,
        len(share),
    )


def near(graph: LayoutGraph, hops: int) -> npt.NDArray[np.bool_]:
    """(n,): which nodes are at most so many edges, in either direction, from a configurable one."""
    found = np.zeros(graph.n_nodes, bool)
    found[graph.config_ids] = True
    consumer, producer = np.asarray(graph.edge_index).T
    for _ in range(hops):
        wider = found.copy()
        wider[producer[found[consumer]]] = True
        wider[consumer[found[producer]]] = True
        if np.array_equal(wider, found):  # all that can be reached; a file may claim any number of steps
            break
        found = wider
    return found


def node_shares(node_feat: npt.NDArray[Any]) -> Floats:
    """Each node's part of all elements that the nodes produce."""
    elements = np.maximum(node_feat[:, NODE_COLUMN["shape_dimensions_product"]].astype(np.float64), 0.0)
    total = elements.sum()
    return np.asarray(elements / total if total > 0 else np.full(len(elements), 1 / len(elements)), dtype=np.float32)


class SegmentedGraphs:
    """The segments of several graphs, remembered while they fit a budget and else made again when asked for."""

    def __init__(
        self, graphs: Sequence[LayoutGraph], scaling: Scaling, hops: int, segment_nodes: int, budget: int = CACHE_BYTES
    ) -> None:
        self.graphs, self._left = graphs, budget
        self.scaling, self.hops, self.segment_nodes = scaling, hops, segment_nodes
        self._kept: dict[int, list[Segment]] = {}

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, index: int) -> list[Segment]:
        if index in self._kept:
            return self._kept[index]
        segments = cut(self.graphs[index], self.scaling, self.hops, self.segment_nodes)
        size = sum(segment.nbytes for segment in segments)
        if size <= self._left:
            self._left -= size
            self._kept[index] = segments
        return segments
