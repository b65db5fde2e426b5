"""Kernel descriptions: the loops of a kernel, the loops that index each operand, and the tile size of each loop.

A tuning log does not say what its kernels compute. A description, a small JSON file, adds that. It turns the sizes in a
log into a graph, and the parameters into tile bounds:

    {"operation": "dot", "dtype": "f16", "loops": {"m": "m", "n": "n", "k": "k"},
     "operands": [["m", "k"], ["k", "n"]], "result": ["m", "n"],
     "tile": {"m": ["BLOCK_M"], "n": ["BLOCK_N"], "k": ["BLOCK_K"]}}

A loop's size is a number or the name of a size or parameter in the log. A loop's tile size is the product of the named
parameters. Without a description a kernel is one instruction whose shape consists of the sizes in the log.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewise._files import read_json_input
from tilewise.costmodel.data.importers.record import Value
from tilewise.costmodel.data.schema import DIMENSIONS, ELEMENT_TYPES, NODE_COLUMN, OPCODE_NUMBER
from tilewise.costmodel.hlo.graph import GraphBuilder, KernelGraph, sequence_features
from tilewise.errors import FileFormatError

_MAX_SIZE = 1 << 40
_MAX_ENTRIES = 64  # loops, operands and names in a description
_SHAPE_COLUMN = NODE_COLUMN["shape_dimensions_0"]
_TORCH_DTYPES = {"torch.float16": "f16", "torch.bfloat16": "bf16", "torch.float32": "f32", "torch.float64": "f64"}
_KEYS = ("operation", "dtype", "loops", "operands", "result", "tile")


@dataclass(frozen=True)
class KernelDescription:
    """The computation of a kernel; the top of this file explains the fields."""

    loops: Mapping[str, int | str]
    operands: Sequence[Sequence[str]]
    result: Sequence[str]
    tile: Mapping[str, Sequence[str]]
    operation: str = "custom-call"
    dtype: str = "f32"
    dtype_field: str = ""  # the log's field with PyTorch's name of the dtype; without that field `dtype` applies
    stride_prefixes: Sequence[str] = ()  # per operand: prefix of the log's two stride fields

    def graph(self, values: Mapping[str, Value]) -> KernelGraph | None:
        """Build the graph for the sizes in `values`; None if the log lacks one of them."""
        # Resolve every loop, then build the graph from a cached template and fill in the shapes.
        sizes = {loop: _look_up_size(size, values) for loop, size in self.loops.items()}
        if None in sizes.values():
            return None
        shape = {loop: int(size or 0) for loop, size in sizes.items()}
        dtype = _TORCH_DTYPES.get(str(values.get(self.dtype_field)), self.dtype)
        transposed = tuple(_is_transposed(prefix, values) for prefix in self.stride_prefixes)
        template = _graph_template(
            self.operation,
            dtype,
            tuple(map(len, self.operands)),
            transposed or (False,) * len(self.operands),
            len(self.result),
        )
        return _with_shapes(template, [[shape[loop] for loop in loops] for loops in (*self.operands, self.result)])

    def bounds(self, config: Mapping[str, Value]) -> list[int]:
        """Return the 24 tile columns: the tile's bounds in the second operand, the result and the first operand."""
        # TpuGraphs orders the bounds as kernel (second operand), output, input (first operand).
        first = self.operands[0] if self.operands else ()
        second = self.operands[1] if len(self.operands) > 1 else ()
        return [
            number
            for loops in (second, self.result, first)
            for number in sequence_features(
                [self._tile_size(loop, config) for loop in loops], DIMENSIONS, empty_product=0
            )
        ]

    def _tile_size(self, loop: str, config: Mapping[str, Value]) -> int:
        """Return the tile size of a loop; 0 if the configuration does not determine it."""
        # A tile may be a product, such as block size times unroll factor.
        parameters = [_look_up_size(name, config) for name in self.tile.get(loop, ())]
        sizes = [size for size in parameters if size is not None]
        return min(math.prod(sizes), _MAX_SIZE) if sizes and len(sizes) == len(parameters) else 0

    @property
    def tile_parameters(self) -> frozenset[str]:
        """Parameters that equal a tile bound: they need no separate column."""
        return frozenset(names[0] for names in self.tile.values() if len(names) == 1)


MATRIX_PRODUCT = KernelDescription(
    loops={"m": "m", "n": "n", "k": "k"},
    operands=(("m", "k"), ("k", "n")),
    result=("m", "n"),
    tile={"m": ("BLOCK-M",), "n": ("BLOCK-N",), "k": ("BLOCK-K",)},
    operation="dot",
    dtype="f16",
    dtype_field="mat1_dtype",
    stride_prefixes=("mat1", "mat2"),
)


def plain_graph(sizes: Mapping[str, Value]) -> KernelGraph:
    """Build a graph of one unknown instruction whose shape consists of the log's sizes."""
    # TpuGraphs stores at most six dimensions.
    numbers = [int(min(abs(value), _MAX_SIZE)) for value in sizes.values() if isinstance(value, float)]
    numbers = numbers[:DIMENSIONS]
    return _with_shapes(_graph_template("custom-call", "f32", (), (), len(numbers)), [numbers])


@functools.lru_cache(1000)
def _graph_template(
    operation: str, dtype: str, ranks: tuple[int, ...], transposed: tuple[bool, ...], result_rank: int
) -> KernelGraph:
    """Build the graph of an operation with all sizes 0; the many kernels of a log differ in their sizes only."""
    # Operands are parameters of the graph; the operation is its root.
    builder = GraphBuilder()
    operands = [
        builder.parameter([0] * rank, dtype, transposed=is_transposed)
        for rank, is_transposed in zip(ranks, transposed, strict=True)
    ]
    builder.add(operation, [0] * result_rank, dtype, *operands)
    return builder.build()


def _with_shapes(template: KernelGraph, shapes: Sequence[Sequence[int]]) -> KernelGraph:
    """Return the template with the given shape of each instruction."""
    features = template.node_feat.copy()
    shape_columns = slice(_SHAPE_COLUMN, _SHAPE_COLUMN + DIMENSIONS + 2)  # the sizes, their sum and product
    features[:, shape_columns] = [sequence_features(shape, DIMENSIONS) for shape in shapes]
    return template._replace(node_feat=features)


def read_description(path: Path) -> KernelDescription:
    """Read and check the description in the JSON file `path`."""
    content = read_json_input(path, 1 << 20)
    if not isinstance(content, dict) or not {"loops", "operands", "result"} <= content.keys() <= set(_KEYS):
        raise FileFormatError(
            f"{path} must be an object with loops, operands and result; tile, operation and dtype are optional."
        )
    loops = _check_table(content["loops"], path, "loops")
    operands = [
        _check_loops(names, loops, path, "operands") for names in _check_list(content["operands"], path, "operands")
    ]
    tile = _check_table(content.get("tile", {}), path, "tile")
    if not tile.keys() <= loops.keys() or not all(
        isinstance(size, int | str) and not isinstance(size, bool) for size in loops.values()
    ):
        raise FileFormatError(
            f"{path}: a loop's size must be a number or a name, and tile may only name loops that are listed."
        )
    # Both must be names that the node features can represent.
    operation, dtype = content.get("operation", "custom-call"), content.get("dtype", "f32")
    if str(operation) not in OPCODE_NUMBER or str(dtype) not in ELEMENT_TYPES:
        raise FileFormatError(
            f"{path}: {operation!r} is not an operation of HLO, or {dtype!r} is not a number type such as f32."
        )
    return KernelDescription(
        loops=loops,
        operands=operands,
        result=_check_loops(content["result"], loops, path, "result"),
        tile={loop: _check_texts(_check_list(names, path, "tile"), path) for loop, names in tile.items()},
        operation=str(operation),
        dtype=str(dtype),
    )


def _look_up_size(size: int | str, values: Mapping[str, Value]) -> int | None:
    """Resolve a size that is a number or the name of a value; None if it is unknown or out of range."""
    value = values.get(size) if isinstance(size, str) else size
    return int(value) if isinstance(value, int | float) and 0 <= value <= _MAX_SIZE else None


def _is_transposed(prefix: str, values: Mapping[str, Value]) -> bool:
    """Return whether the log's strides say that a matrix is stored in column-major order."""
    return values.get(f"{prefix}_stride_0") == 1.0 != values.get(f"{prefix}_stride_1", 1.0)


def _check_table(value: Any, path: Path, name: str) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > _MAX_ENTRIES:
        raise FileFormatError(f"{path}: {name} must be an object of at most {_MAX_ENTRIES} loops.")
    return value


def _check_list(value: Any, path: Path, name: str) -> list[Any]:
    if not isinstance(value, list) or len(value) > _MAX_ENTRIES:
        raise FileFormatError(f"{path}: {name} must be a list of at most {_MAX_ENTRIES} entries.")
    return value


def _check_texts(values: list[Any], path: Path) -> list[str]:
    if not all(isinstance(value, str) for value in values):
        raise FileFormatError(f"{path}: the names of loops and parameters must be texts.")
    return values


def _check_loops(value: Any, loops: Mapping[str, Any], path: Path, name: str) -> list[str]:
    loop_names = _check_texts(_check_list(value, path, name), path)
    if not set(loop_names) <= loops.keys():
        raise FileFormatError(f"{path}: {name} may only name loops that are listed.")
    return loop_names
