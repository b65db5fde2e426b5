"""A kernel in a few words: its loops, what each operand is indexed by, and which parameters cut which loop.

A tuning log says nothing about what is computed. A description, a small JSON file, does, and turns sizes into a graph
and parameters into the tile's bounds:

    {"operation": "dot", "dtype": "f16", "loops": {"m": "m", "n": "n", "k": "k"},
     "operands": [["m", "k"], ["k", "n"]], "result": ["m", "n"],
     "tile": {"m": ["BLOCK_M"], "n": ["BLOCK_N"], "k": ["BLOCK_K"]}}

A loop's size is a number or the name of a size or parameter in the log; a loop's tile is the product of the parameters
named. Without a description a kernel is one instruction whose shape is the sizes that the log has.
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
from tilewise.costmodel.hlo.featurize import sequence_features
from tilewise.costmodel.hlo.graph import GraphBuilder, KernelGraph
from tilewise.errors import FileFormatError

_LARGEST = 1 << 40
_SHAPE = NODE_COLUMN["shape_dimensions_0"]
_TYPES = {"torch.float16": "f16", "torch.bfloat16": "bf16", "torch.float32": "f32", "torch.float64": "f64"}
_KEYS = ("operation", "dtype", "loops", "operands", "result", "tile")


@dataclass(frozen=True)
class Description:
    """What a kernel computes; see the top of this file for the meaning of each part."""

    loops: Mapping[str, int | str]
    operands: Sequence[Sequence[str]]
    result: Sequence[str]
    tile: Mapping[str, Sequence[str]]
    operation: str = "custom-call"
    dtype: str = "f32"
    dtype_named: str = ""  # what the log calls the number type, as PyTorch names it; `dtype` where it says nothing
    strides_named: Sequence[str] = ()  # what the log's two strides of each operand begin with

    def graph(self, values: Mapping[str, Value]) -> KernelGraph | None:
        """The graph at these sizes; None where the log lacks one of them."""
        sizes = {loop: _size(size, values) for loop, size in self.loops.items()}
        if None in sizes.values():
            return None
        shape = {loop: int(size or 0) for loop, size in sizes.items()}
        dtype = _TYPES.get(str(values.get(self.dtype_named)), self.dtype)
        turned = tuple(_turned(name, values) for name in self.strides_named) or (False,) * len(self.operands)
        ranks = tuple(map(len, self.operands))
        outline = _outline(self.operation, dtype, ranks, turned, len(self.result))
        return _sized(outline, [[shape[loop] for loop in loops] for loops in (*self.operands, self.result)])

    def bounds(self, config: Mapping[str, Value]) -> list[int]:
        """The 24 columns of a tile: bounds of the second operand's, of the result's and of the first operand's."""
        first = self.operands[0] if self.operands else ()
        second = self.operands[1] if len(self.operands) > 1 else ()
        return [
            number
            for loops in (second, self.result, first)
            for number in sequence_features([self._extent(loop, config) for loop in loops], DIMENSIONS, empty_product=0)
        ]

    def _extent(self, loop: str, config: Mapping[str, Value]) -> int:
        """How much of a loop one tile takes; 0 where nothing says so."""
        factors = [_size(name, config) for name in self.tile.get(loop, ())]
        known = [factor for factor in factors if factor is not None]
        return min(math.prod(known), _LARGEST) if known and len(known) == len(factors) else 0

    @property
    def told(self) -> frozenset[str]:
        """Parameters that the bounds tell whole: they need no column of their own."""
        return frozenset(names[0] for names in self.tile.values() if len(names) == 1)


MATRIX_PRODUCT = Description(
    loops={"m": "m", "n": "n", "k": "k"},
    operands=(("m", "k"), ("k", "n")),
    result=("m", "n"),
    tile={"m": ("BLOCK-M",), "n": ("BLOCK-N",), "k": ("BLOCK-K",)},
    operation="dot",
    dtype="f16",
    dtype_named="mat1_dtype",
    strides_named=("mat1", "mat2"),
)


def plain_graph(sizes: Mapping[str, Value]) -> KernelGraph:
    """One instruction nobody knows, of the sizes that are there."""
    numbers = [int(min(abs(value), _LARGEST)) for value in sizes.values() if isinstance(value, float)]
    numbers = numbers[:DIMENSIONS]
    return _sized(_outline("custom-call", "f32", (), (), len(numbers)), [numbers])


@functools.lru_cache(1000)
def _outline(
    operation: str, dtype: str, ranks: tuple[int, ...], turned: tuple[bool, ...], result_rank: int
) -> KernelGraph:
    """An operation on its operands whose sizes are all 0: a log's many kernels differ in their sizes alone."""
    builder = GraphBuilder()
    operands = [
        builder.parameter([0] * rank, dtype, transposed=transposed)
        for rank, transposed in zip(ranks, turned, strict=True)
    ]
    builder.add(operation, [0] * result_rank, dtype, *operands)
    return builder.build()


def _sized(outline: KernelGraph, shapes: Sequence[Sequence[int]]) -> KernelGraph:
    """The outline with the shape of each instruction."""
    features = outline.node_feat.copy()
    features[:, _SHAPE : _SHAPE + DIMENSIONS + 2] = [sequence_features(shape, DIMENSIONS) for shape in shapes]
    return outline._replace(node_feat=features)


def read_description(path: Path) -> Description:
    """The description in the JSON file `path`."""
    content = read_json_input(path, 1 << 20)
    if not isinstance(content, dict) or not {"loops", "operands", "result"} <= content.keys() <= set(_KEYS):
        raise FileFormatError(
            f"{path} must be an object with loops, operands and result; tile, operation and dtype may follow."
        )
    loops = _table(content["loops"], path, "loops")
    named = set(loops)
    operands = [_names(loops_of, named, path, "operands") for loops_of in _list(content["operands"], path, "operands")]
    tile = _table(content.get("tile", {}), path, "tile")
    if not set(tile) <= named or not all(
        isinstance(size, int | str) and not isinstance(size, bool) for size in loops.values()
    ):
        raise FileFormatError(
            f"{path}: a loop's size is a number or a name, and tile may only cut loops that are listed."
        )
    operation, dtype = content.get("operation", "custom-call"), content.get("dtype", "f32")
    if str(operation) not in OPCODE_NUMBER or str(dtype) not in ELEMENT_TYPES:
        raise FileFormatError(f"{path}: {operation!r} is no operation of HLO, or {dtype!r} no number type such as f32.")
    return Description(
        loops=loops,
        operands=operands,
        result=_names(content["result"], named, path, "result"),
        tile={loop: _words(_list(names, path, "tile"), path) for loop, names in tile.items()},
        operation=str(operation),
        dtype=str(dtype),
    )


def _size(size: int | str, values: Mapping[str, Value]) -> int | None:
    value = values.get(size) if isinstance(size, str) else size
    return int(value) if isinstance(value, int | float) and 0 <= value <= _LARGEST else None


def _turned(name: str, values: Mapping[str, Value]) -> bool:
    """Whether a matrix lies column by column."""
    return values.get(f"{name}_stride_0") == 1.0 != values.get(f"{name}_stride_1", 1.0)


def _table(value: Any, path: Path, name: str) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > 64:
        raise FileFormatError(f"{path}: {name} must be an object of at most 64 loops.")
    return value


def _list(value: Any, path: Path, name: str) -> list[Any]:
    if not isinstance(value, list) or len(value) > 64:
        raise FileFormatError(f"{path}: {name} must be a list of at most 64.")
    return value


def _words(values: list[Any], path: Path) -> list[str]:
    if not all(isinstance(value, str) for value in values):
        raise FileFormatError(f"{path}: parameters are named by texts.")
    return values


def _names(value: Any, named: set[str], path: Path, name: str) -> list[str]:
    loops = _words(_list(value, path, name), path)
    if not set(loops) <= named:
        raise FileFormatError(f"{path}: {name} may only name loops that are listed.")
    return loops
