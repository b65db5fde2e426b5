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

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewise._files import read_json_input
from tilewise.costmodel.data.importers.record import Value
from tilewise.costmodel.data.schema import DIMENSIONS, ELEMENT_TYPES, OPCODE_NUMBER
from tilewise.costmodel.hlo.graph import GraphBuilder, KernelGraph, sequence_features
from tilewise.errors import FileFormatError

_MAX_SIZE = 1 << 40
_MAX_ENTRIES = 64  # loops, operands and names in a description
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
        sizes = {loop: _look_up_size(size, values) for loop, size in self.loops.items()}
        if None in sizes.values():
            return None
        dtype = _TORCH_DTYPES.get(str(values.get(self.dtype_field)), self.dtype)
        transposed = [_is_transposed(prefix, values) for prefix in self.stride_prefixes] or [False] * len(self.operands)
        # Operands are parameters of the graph; the operation is its root.
        builder = GraphBuilder()
        operands = [
            builder.parameter([sizes[loop] or 0 for loop in loops], dtype, transposed=is_transposed)
            for loops, is_transposed in zip(self.operands, transposed, strict=True)
        ]
        builder.add(self.operation, [sizes[loop] or 0 for loop in self.result], dtype, *operands)
        return builder.build()

    def bounds(self, config: Mapping[str, Value]) -> list[int]:
        """Return the 24 tile columns: a tile's bounds in the second operand, the result, the first operand."""
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
        """Return the tile size of a loop in a configuration; 0 if the configuration has none."""
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
    builder = GraphBuilder()
    builder.add("custom-call", numbers, "f32")
    return builder.build()


def read_description(path: Path) -> KernelDescription:
    """Read and check the description in the JSON file `path`."""
    content = read_json_input(path, 1 << 20)
    if not isinstance(content, dict) or not {"loops", "operands", "result"} <= content.keys() <= set(_KEYS):
        raise FileFormatError(
            f"{path} must be an object with loops, operands and result; tile, operation and dtype are optional."
        )
    loops, tile = content["loops"], content.get("tile", {})
    for name, value in (("loops", loops), ("tile", tile)):
        if not isinstance(value, dict) or len(value) > _MAX_ENTRIES:
            raise FileFormatError(f"{path}: {name} must be an object of at most {_MAX_ENTRIES} loops.")
    if not tile.keys() <= loops.keys() or not all(type(size) in (int, str) for size in loops.values()):
        raise FileFormatError(
            f"{path}: a loop's size must be a number or a name, and tile may only name loops that are listed."
        )
    # Both must be names that the node features can represent.
    operation, dtype = str(content.get("operation", "custom-call")), str(content.get("dtype", "f32"))
    if operation not in OPCODE_NUMBER or dtype not in ELEMENT_TYPES:
        raise FileFormatError(
            f"{path}: {operation!r} is not an operation of HLO, or {dtype!r} is not a number type such as f32."
        )
    return KernelDescription(
        loops=loops,
        operands=[_check_names(names, path, loops) for names in _check_list(content["operands"], path)],
        result=_check_names(content["result"], path, loops),
        tile={loop: _check_names(names, path) for loop, names in tile.items()},
        operation=operation,
        dtype=dtype,
    )


def _look_up_size(size: int | str, values: Mapping[str, Value]) -> int | None:
    """Resolve a size that is a number or the name of a value; None if it is unknown or out of range."""
    value = values.get(size) if isinstance(size, str) else size
    return int(value) if isinstance(value, int | float) and 0 <= value <= _MAX_SIZE else None


def _is_transposed(prefix: str, values: Mapping[str, Value]) -> bool:
    """Tell whether the strides in a log, under names with this prefix, are those of a column-major matrix."""
    return values.get(f"{prefix}_stride_0") == 1.0 != values.get(f"{prefix}_stride_1", 1.0)


def _check_list(value: Any, path: Path) -> list[Any]:
    """Return `value`; raise `FileFormatError` unless it is a list of at most `_MAX_ENTRIES`."""
    if not isinstance(value, list) or len(value) > _MAX_ENTRIES:
        raise FileFormatError(
            f"{path}: operands, result and each tile must be lists of at most {_MAX_ENTRIES} entries."
        )
    return value


def _check_names(value: Any, path: Path, loops: Mapping[str, Any] | None = None) -> list[str]:
    """Return `value`; raise `FileFormatError` unless it is a list of names (keys of `loops`, if passed)."""
    names = _check_list(value, path)
    if not all(isinstance(name, str) for name in names):
        raise FileFormatError(f"{path}: the names of loops and parameters must be texts.")
    if loops is not None and not set(names) <= loops.keys():
        raise FileFormatError(f"{path}: operands and result may only name loops that are listed.")
    return names
