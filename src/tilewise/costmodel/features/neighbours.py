"""Adjacency lists of kernel graphs, in the flat tables that the compiled graph-network kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Neighbours:
    """Neighbours of every node in A + A^T, as indices within the node's graph; a repeated edge counts every time."""

    first_node: npt.NDArray[np.int64]  # (graphs + 1,)
    first_edge: npt.NDArray[np.int64]  # (nodes + 1,)
    indices: npt.NDArray[np.int32]  # (edges,)

    @classmethod
    def from_edges(cls, edges: npt.NDArray[Any], nodes: int) -> Neighbours:
        """Build the lists of one graph from its rows [u, v]."""
        rows, columns = np.concatenate([edges[:, 1], edges[:, 0]]), np.concatenate([edges[:, 0], edges[:, 1]])
        # Compressed rows: sort both directions of every edge by their first node.
        order = np.argsort(rows, kind="stable")
        first_edge = np.zeros(nodes + 1, np.int64)
        np.cumsum(np.bincount(rows, minlength=nodes), out=first_edge[1:])
        return cls(np.array([0, nodes]), first_edge, columns[order].astype(np.int32))

    @classmethod
    def concatenate(cls, graphs: Sequence[Neighbours]) -> Neighbours:
        """Put several graphs into one table, in order."""
        if len(graphs) == 1:
            return graphs[0]
        first_node = np.cumsum([0, *(len(graph.first_edge) - 1 for graph in graphs)])
        edge_offsets = np.cumsum([0, *(len(graph.indices) for graph in graphs)])
        starts = [graph.first_edge[:-1] + at for graph, at in zip(graphs, edge_offsets[:-1].tolist(), strict=True)]
        first_edge = np.concatenate([*starts, edge_offsets[-1:]])
        return cls(first_node, first_edge, np.concatenate([graph.indices for graph in graphs]))

    @property
    def tables(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        return self.first_node, self.first_edge, self.indices
