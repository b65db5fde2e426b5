"""A small builder of HLO instructions that fills the 140 node features of a TpuGraphs graph.

A graph built here equals the graph that `featurize_hlo` makes of the compiler's own module: numbers that do not apply
are 0, products of empty lists are 1, called computations come before their caller, and edges are sorted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.schema import DIMENSIONS, NODE_COLUMN, NODE_FEATURES, OPCODE_NUMBER, WINDOW_FIELDS

Shape = tuple[int, ...]

# Features of an instruction without attributes: the products of empty lists are 1.
_EMPTY_ROW = [int(name.endswith("_product")) for name in NODE_FEATURES]


class KernelGraph(NamedTuple):
    """The graph part of a kernel file."""

    node_feat: npt.NDArray[np.float32]  # (n, 140)
    node_opcode: npt.NDArray[np.uint8]  # (n,)
    edge_index: npt.NDArray[Any]  # (m, 2) integers: row [u, v], u consumes the output of v


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
class HloNode:
    """One instruction: its opcode, the shape and dtype of its result, and its operands."""

    opcode: str
    shape: Shape
    dtype: str
    operands: tuple[HloNode, ...] = ()
    features: dict[str, int] = field(default_factory=dict)
    windows: tuple[Window, ...] = ()
    calls: tuple[HloNode, ...] | None = None  # instructions of a called computation, its root last


class GraphBuilder:
    """Collects instructions in the order they are added; the last one is the root.

    >>> g = GraphBuilder()
    >>> x, w = g.parameter((8, 16), "f32"), g.parameter((16, 4), "f32")
    >>> g.add("dot", (8, 4), "f32", x, w).shape
    (8, 4)
    >>> g.build().edge_index.tolist()
    [[2, 0], [2, 1]]
    """

    def __init__(self) -> None:
        self.nodes: list[HloNode] = []

    def add(
        self,
        opcode: str,
        shape: Sequence[int],
        dtype: str,
        *operands: HloNode,
        dimensions: Sequence[int] = (),
        minor_to_major: Sequence[int] | None = None,
        **features: int,
    ) -> HloNode:
        """Add an instruction with its result's shape and dtype, and return its node.

        `dimensions` has HLO's meaning: the result dimensions of a broadcast's operand, or those that a reduce removes.
        """
        node = HloNode(opcode, tuple(shape), dtype, operands, dict(features))
        layout = minor_to_major if minor_to_major is not None else range(len(node.shape) - 1, -1, -1)
        node.features |= _numbered_columns("dimensions", dimensions) | _numbered_columns(
            "layout_minor_to_major", layout
        )
        self.nodes.append(node)
        return node

    def parameter(self, shape: Sequence[int], dtype: str, *, transposed: bool = False) -> HloNode:
        """Add the next parameter; `transposed` swaps the order of its last two dimensions in memory."""
        rank = len(shape)
        layout = [*range(rank - 1, -1, -1)]
        # The logical shape stays: only the order of the dimensions in memory differs.
        if transposed:
            layout[0], layout[1] = layout[1], layout[0]
        number = sum(node.opcode == "parameter" for node in self.nodes)
        return self.add("parameter", shape, dtype, minor_to_major=layout, parameter_number=number)

    def constant(self, dtype: str) -> HloNode:
        return self.add("constant", (), dtype)

    def broadcast(self, x: HloNode, shape: Sequence[int], dimensions: Sequence[int] = ()) -> HloNode:
        return self.add("broadcast", shape, x.dtype, x, dimensions=dimensions)

    def full(self, shape: Sequence[int], dtype: str) -> HloNode:
        """Add a scalar constant broadcast to `shape`."""
        return self.broadcast(self.constant(dtype), shape)

    def convert(self, x: HloNode, dtype: str) -> HloNode:
        """Convert `x` to another dtype; return `x` itself if it has that dtype."""
        return x if x.dtype == dtype else self.add("convert", x.shape, dtype, x)

    def binary(self, opcode: str, x: HloNode, y: HloNode) -> HloNode:
        return self.add(opcode, x.shape, x.dtype, x, y)

    def unary(self, opcode: str, x: HloNode) -> HloNode:
        return self.add(opcode, x.shape, x.dtype, x)

    def reduce(self, opcode: str, x: HloNode, axes: Sequence[int]) -> HloNode:
        """Reduce `axes` by `opcode` (add or maximum), which is a separate computation, as in HLO."""
        combine = GraphBuilder()
        combine.binary(opcode, combine.parameter((), x.dtype), combine.parameter((), x.dtype))
        result_shape = [size for axis, size in enumerate(x.shape) if axis not in axes]
        node = self.add("reduce", result_shape, x.dtype, x, self.constant(x.dtype), dimensions=axes)
        node.calls = tuple(combine.nodes)
        return node

    def convolution(
        self, x: HloNode, w: HloNode, shape: Sequence[int], windows: Sequence[Window], groups: int
    ) -> HloNode:
        """Add a 2-D convolution of `x` (N, C, H, W) with filters `w` (out, C / groups, height, width)."""
        names = "convolution_dim_numbers"
        # Positions of the channel and spatial dimensions; batch and output channels are dimension 0, the default.
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
        """Return the arrays of the graph; the nodes of called computations come before all others."""
        subcomputations = [node.calls for node in self.nodes if node.calls is not None]
        computations = [*subcomputations, tuple(self.nodes)]
        # Edges refer to rows, so rows are numbered first.
        order = [node for computation in computations for node in computation]
        row_of = {id(node): row for row, node in enumerate(order)}
        roots = {id(computation[-1]) for computation in computations}
        # A set: an instruction that uses an operand twice has one edge to it.
        edges = {(row_of[id(node)], row_of[id(source)]) for node in order for source in _sources(node)}
        return KernelGraph(
            np.array([_row(node, id(node) in roots) for node in order], np.int64).astype(np.float32),
            np.array([OPCODE_NUMBER[node.opcode] for node in order], np.uint8),
            np.array(sorted(edges), np.int32).reshape(-1, 2),
        )


def _sources(node: HloNode) -> tuple[HloNode, ...]:
    """Return a node's operands, and the root of the computation that it calls if it calls one."""
    return node.operands if node.calls is None else (*node.operands, node.calls[-1])


def _numbered_columns(stem: str, values: Sequence[int] | range) -> dict[str, int]:
    return {f"{stem}_{index}": value for index, value in enumerate(list(values)[:DIMENSIONS])}


def _row(node: HloNode, is_root: bool) -> list[int]:
    """Return the 140 features of a node as integers, which are converted to float32 at the end."""
    row = _EMPTY_ROW.copy()
    row[NODE_COLUMN["is_root"]] = int(is_root)
    row[NODE_COLUMN[f"shape_element_type_is_{node.dtype}"]] = 1
    _set_list(row, "shape_dimensions", node.shape)
    for name in WINDOW_FIELDS if node.windows else ():
        _set_list(row, f"window_{name}", [getattr(window, name) for window in node.windows])
    row[NODE_COLUMN["window_window_reversal_false_count"]] = len(node.windows)
    for name, value in node.features.items():
        row[NODE_COLUMN[name]] = value
    return row


def _set_list(row: list[int], stem: str, values: Sequence[int]) -> None:
    """Write a list, its sum and its product to the columns of `row` whose names begin with `stem`."""
    first = NODE_COLUMN[f"{stem}_0"]
    row[first : first + DIMENSIONS + 2] = sequence_features(values, DIMENSIONS)


def sequence_features(values: Iterable[int], width: int, empty_product: int = 1) -> list[int]:
    """Return the first `width` values, padded with zeros, then the sum and the product of all values.

    >>> sequence_features([8, 4], 3)
    [8, 4, 0, 12, 32]
    """
    values = list(values)
    total, product = 0, 1 if values else empty_product
    for value in values:
        total = _wrap(total + value)
        product = _wrap(product * value)
    return [*pad_sequence(values, width), total, product]


def pad_sequence(values: Iterable[int], width: int) -> list[int]:
    first = list(values)[:width]
    return first + [0] * (width - len(first))


def _wrap(value: int) -> int:
    """Wrap an integer to 64 bits, signed, as overflowing C arithmetic does."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
