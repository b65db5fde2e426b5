"""A kernel's graph as graph networks walk it: who is next to whom, in flat tables that the compiled kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Neighbours:
    """Each node's neighbours in A + A^T, numbered within their graph; a repeated edge counts every time."""

    first_node: npt.NDArray[np.int64]  # (graphs + 1)
    first_edge: npt.NDArray[np.int64]  # (nodes + 1)
    near: npt.NDArray[np.int32]

    @classmethod
    def of_one(cls, edges: npt.NDArray[Any], nodes: int) -> Neighbours:
        """One graph, from its rows [u, v]."""
        rows, columns = np.concatenate([edges[:, 1], edges[:, 0]]), np.concatenate([edges[:, 0], edges[:, 1]])
        order = np.argsort(rows, kind="stable")
        first_edge = np.zeros(nodes + 1, np.int64)
        np.cumsum(np.bincount(rows, minlength=nodes), out=first_edge[1:])
        return cls(np.array([0, nodes]), first_edge, columns[order].astype(np.int32))

    @classmethod
    def joined(cls, parts: Sequence[Neighbours]) -> Neighbours:
        """Several graphs one after another."""
        if len(parts) == 1:
            return parts[0]
        first_node = np.cumsum([0, *(len(part.first_edge) - 1 for part in parts)])
        ends = np.cumsum([0, *(len(part.near) for part in parts)])
        pieces = [part.first_edge[:-1] + end for part, end in zip(parts, ends[:-1].tolist(), strict=True)]
        return cls(first_node, np.concatenate([*pieces, ends[-1:]]), np.concatenate([part.near for part in parts]))

    @property
    def tables(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        return self.first_node, self.first_edge, self.near
