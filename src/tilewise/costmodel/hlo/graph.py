"""The graph of a kernel in TpuGraphs' terms: a small builder of instructions that fills the 140 node features.

It follows the same rules as `costmodel.hlo`, so a graph built here equals the one featurized from the compiler's own
module: numbers that do not apply are 0, products of empty lists are 1, computations that are called come before the one
that calls them, and edges are sorted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.schema import DIMENSIONS, NODE_COLUMN, NODE_FEATURES, OPCODE_NUMBER, WINDOW_FIELDS
from tilewise.costmodel.hlo.featurize import sequence_features

Shape = tuple[int, ...]

# An instruction that nothing is said of: products of lists that are empty are 1.
_BLANK = [int(name.endswith("_product")) for name in NODE_FEATURES]


class KernelGraph(NamedTuple):
    """The graph part of a kernel file."""

    node_feat: npt.NDArray[np.float32]  # (n, 140)
    node_opcode: npt.NDArray[np.uint8]  # (n,)
    edge_index: npt.NDArray[np.int32]  # (m, 2): row [u, v], u consumes the output of v


@dataclass(frozen=True)
class Window:
    """One spatial dimension of a convolution."""

    size: int
    stride: int = 1
    padding_low: int = 0
    padding_high: int = 0
    window_dilation: int = 1
    base_dilation: int = 1


@dataclass(eq=False)
class Node:
    """One instruction: what it is, what it gives, what it consumes."""

    opcode: str
    shape: Shape
    dtype: str
    operands: tuple[Node, ...] = ()
    features: dict[str, int] = field(default_factory=dict)
    windows: tuple[Window, ...] = ()
    calls: tuple[Node, ...] | None = None  # another computation, its root last


class GraphBuilder:
    """Instructions in the order they are added; the last one is the root.

    >>> g = GraphBuilder()
    >>> x, w = g.parameter((8, 16), "f32"), g.parameter((16, 4), "f32")
    >>> g.add("dot", (8, 4), "f32", x, w).shape
    (8, 4)
    >>> g.build().edge_index.tolist()
    [[2, 0], [2, 1]]
    """

    def __init__(self) -> None:
        self._nodes: list[Node] = []

    def add(
        self,
        opcode: str,
        shape: Sequence[int],
        dtype: str,
        *operands: Node,
        dimensions: Sequence[int] = (),
        minor_to_major: Sequence[int] | None = None,
        **features: int,
    ) -> Node:
        """An instruction. `dimensions` as HLO has them (what a broadcast maps, what a reduce removes)."""
        node = Node(opcode, tuple(shape), dtype, operands, dict(features))
        layout = minor_to_major if minor_to_major is not None else range(len(node.shape) - 1, -1, -1)
        node.features |= _numbered("dimensions", dimensions) | _numbered("layout_minor_to_major", layout)
        self._nodes.append(node)
        return node

    def parameter(self, shape: Sequence[int], dtype: str, *, transposed: bool = False) -> Node:
        """The next argument; `transposed`: its last two dimensions lie the other way round in memory."""
        rank = len(shape)
        layout = [*range(rank - 1, -1, -1)]
        if transposed:
            layout[0], layout[1] = layout[1], layout[0]
        number = sum(node.opcode == "parameter" for node in self._nodes)
        return self.add("parameter", shape, dtype, minor_to_major=layout, parameter_number=number)

    def constant(self, dtype: str) -> Node:
        return self.add("constant", (), dtype)

    def broadcast(self, x: Node, shape: Sequence[int], dimensions: Sequence[int] = ()) -> Node:
        return self.add("broadcast", shape, x.dtype, x, dimensions=dimensions)

    def spread(self, shape: Sequence[int], dtype: str) -> Node:
        """A constant in every element."""
        return self.broadcast(self.constant(dtype), shape)

    def convert(self, x: Node, dtype: str) -> Node:
        """`x` in another number type; `x` itself where it has it already."""
        return x if x.dtype == dtype else self.add("convert", x.shape, dtype, x)

    def binary(self, opcode: str, x: Node, y: Node) -> Node:
        return self.add(opcode, x.shape, x.dtype, x, y)

    def unary(self, opcode: str, x: Node) -> Node:
        return self.add(opcode, x.shape, x.dtype, x)

    def reduce(self, opcode: str, x: Node, axes: Sequence[int]) -> Node:
        """Fold `axes` away by `opcode` (add or maximum), which is a computation of its own, as in HLO."""
        fold = GraphBuilder()
        fold.binary(opcode, fold.parameter((), x.dtype), fold.parameter((), x.dtype))
        kept = [size for axis, size in enumerate(x.shape) if axis not in axes]
        node = self.add("reduce", kept, x.dtype, x, self.constant(x.dtype), dimensions=axes)
        node.calls = tuple(fold._nodes)
        return node

    def convolution(self, x: Node, w: Node, shape: Sequence[int], windows: Sequence[Window], groups: int) -> Node:
        """A 2-D convolution of (batch, channels, height, width) by (out, in / groups, height, width)."""
        names = "convolution_dim_numbers"
        numbers = {
            f"{names}_input_feature_dim": 1, f"{names}_input_spatial_dims_0": 2, f"{names}_input_spatial_dims_1": 3,
            f"{names}_kernel_input_feature_dim": 1, f"{names}_kernel_spatial_dims_0": 2,
            f"{names}_kernel_spatial_dims_1": 3, f"{names}_output_feature_dim": 1,
        }  # fmt: skip
        counts = {"feature_group_count": groups, "batch_group_count": 1}
        node = self.add("convolution", shape, x.dtype, x, w)
        node.features |= numbers | counts
        node.windows = tuple(windows)
        return node

    def build(self) -> KernelGraph:
        """The arrays. Called computations come first, in the order of their callers."""
        regions = [node.calls for node in self._nodes if node.calls is not None]
        computations = [*regions, tuple(self._nodes)]
        order = [node for computation in computations for node in computation]
        place = {id(node): index for index, node in enumerate(order)}
        roots = {id(computation[-1]) for computation in computations}
        edges = {(place[id(node)], place[id(source)]) for node in order for source in _sources(node)}
        return KernelGraph(
            np.array([_row(node, id(node) in roots) for node in order], np.int64).astype(np.float32),
            np.array([OPCODE_NUMBER[node.opcode] for node in order], np.uint8),
            np.array(sorted(edges), np.int32).reshape(-1, 2),
        )


def _sources(node: Node) -> tuple[Node, ...]:
    return node.operands if node.calls is None else (*node.operands, node.calls[-1])


def _numbered(stem: str, values: Sequence[int] | range) -> dict[str, int]:
    return {f"{stem}_{index}": value for index, value in enumerate(list(values)[:DIMENSIONS])}


def _row(node: Node, is_root: bool) -> list[int]:
    row = _BLANK.copy()
    row[NODE_COLUMN["is_root"]] = int(is_root)
    row[NODE_COLUMN[f"shape_element_type_is_{node.dtype}"]] = 1
    _fill(row, "shape_dimensions", node.shape)
    for part in WINDOW_FIELDS if node.windows else ():
        _fill(row, f"window_{part}", [getattr(window, part) for window in node.windows])
    row[NODE_COLUMN["window_window_reversal_false_count"]] = len(node.windows)
    _set(row, node.features)
    return row


def _fill(row: list[int], stem: str, values: Sequence[int]) -> None:
    first = NODE_COLUMN[f"{stem}_0"]
    row[first : first + DIMENSIONS + 2] = sequence_features(values, DIMENSIONS)


def _set(row: list[int], features: Mapping[str, int]) -> None:
    for name, value in features.items():
        row[NODE_COLUMN[name]] = value
