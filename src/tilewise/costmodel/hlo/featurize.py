"""From a compiler's module to the graph a cost model reads, exactly as the TpuGraphs files were made.

`featurize_hlo` takes a serialized ``HloModuleProto`` and gives one row of 140 numbers and one opcode per instruction,
and one edge per operand. The one idea: every number is an int64 until the very end. Sums and products wrap as C++'s
do and each is rounded to float32 once, which is what makes the result equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.schema import ELEMENT_TYPES, NODE_FEATURES, OPCODE_NUMBER, WINDOW_FIELDS
from tilewise.errors import FileFormatError, UnavailableError

MAX_INSTRUCTIONS = 1_000_000

# XLA's numbers of the element types, in the order in which they have a column.
_TYPE_NUMBERS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16, 15, 18, 13, 14, 17)
_TYPE_COLUMN = {number: column for column, number in enumerate(_TYPE_NUMBERS)}
_KEPT = 6
_KEPT_SLICES = 2
_KEPT_SPATIAL = 4


class HloGraph(NamedTuple):
    """A module as the arrays of a kernel file."""

    node_feat: npt.NDArray[np.float32]  # (n, 140)
    node_opcode: npt.NDArray[np.uint8]  # (n,)
    edge_index: npt.NDArray[np.int64]  # (m, 2): row [u, v], u consumes the output of v


def featurize_hlo(serialized_module: bytes) -> HloGraph:
    """The graph of a serialized ``HloModuleProto``.

    >>> node_feat, node_opcode, edge_index = featurize_hlo(path.read_bytes())  # doctest: +SKIP
    """
    hlo_pb2 = protobuf_classes("hlo_pb2")
    return featurize_module(parse_message(hlo_pb2.HloModuleProto(), serialized_module, "The HLO module"))


def featurize_module(module: Any) -> HloGraph:
    """The graph of a parsed ``HloModuleProto``: computations in module order, instructions in computation order."""
    count = sum(len(computation.instructions) for computation in module.computations)
    if not 1 <= count <= MAX_INSTRUCTIONS:
        raise FileFormatError(f"The HLO module has {count} instructions; 1 to {MAX_INSTRUCTIONS} can be read.")
    numbers = np.zeros((count, len(NODE_FEATURES)), np.int64)
    opcodes = np.zeros(count, np.uint8)
    row = 0
    for computation in module.computations:
        for instruction in computation.instructions:
            numbers[row] = _features(instruction, instruction.id == computation.root_id)
            opcodes[row] = OPCODE_NUMBER.get(instruction.opcode, 0)
            row += 1
    return HloGraph(numbers.astype(np.float32), opcodes, _edges(module))


def protobuf_classes(name: str) -> Any:
    """The generated module `name`, or a sentence where protobuf is not installed."""
    import importlib

    try:
        return importlib.import_module(f"tilewise.costmodel.hlo.proto.{name}")
    except ImportError as error:
        raise UnavailableError("Reading HLO needs protobuf: pip install 'tilewise[train]'.") from error


def parse_message(message: Any, content: bytes, what: str) -> Any:
    """`message` filled from `content`; damage of any kind becomes one sentence."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    if not isinstance(content, bytes | bytearray | memoryview):
        raise FileFormatError(f"{what} must be given as bytes, not {type(content).__name__}.")
    try:
        message.ParseFromString(bytes(content))
    except (DecodeError, RecursionError, UnicodeDecodeError, ValueError, MemoryError) as error:
        raise FileFormatError(f"{what} is not a readable protobuf message ({type(error).__name__}).") from error
    return message


def sequence_features(values: Iterable[int], kept: int, empty_product: int = 1) -> list[int]:
    """The first `kept` values, filled up with zeros, then the sum and the product of all values."""
    values = list(values)
    total, product = 0, 1 if values else empty_product
    for value in values:
        total = _wrap(total + value)
        product = _wrap(product * value)
    return [*_padded(values, kept), total, product]


def _features(instruction: Any, is_root: bool) -> list[int]:
    """The 140 numbers of one instruction, in the order of `NODE_FEATURES`; column 1 is always zero."""
    return [
        int(is_root),
        0,
        *_shape(instruction.shape),
        instruction.parameter_number,
        *_padded(instruction.dimensions, _KEPT),
        *_window(instruction.window.dimensions),
        *_convolution(instruction.convolution_dimension_numbers),
        instruction.feature_group_count,
        instruction.batch_group_count,
        *_slices(instruction),
        int(instruction.is_stable),
        *_padded(instruction.shape.layout.minor_to_major, _KEPT),
    ]


def _shape(shape: Any) -> Iterator[int]:
    one_hot = [0] * len(ELEMENT_TYPES)
    column = _TYPE_COLUMN.get(shape.element_type)
    if column is not None:  # types younger than the dataset have no column
        one_hot[column] = 1
    yield from one_hot
    yield from sequence_features(shape.dimensions, _KEPT)
    yield len(shape.tuple_shapes)


def _window(dimensions: Any) -> Iterator[int]:
    for part in WINDOW_FIELDS:
        yield from sequence_features((getattr(dimension, part) for dimension in dimensions), _KEPT)
    reversed_dimensions = [int(dimension.window_reversal) for dimension in dimensions]
    yield from _padded(reversed_dimensions, _KEPT)
    yield sum(reversed_dimensions)
    yield len(reversed_dimensions) - sum(reversed_dimensions)


def _convolution(numbers: Any) -> Iterator[int]:
    yield numbers.input_batch_dimension
    yield numbers.input_feature_dimension
    yield from _padded(numbers.input_spatial_dimensions, _KEPT_SPATIAL)
    yield numbers.kernel_input_feature_dimension
    yield numbers.kernel_output_feature_dimension
    yield from _padded(numbers.kernel_spatial_dimensions, _KEPT_SPATIAL)
    yield numbers.output_batch_dimension
    yield numbers.output_feature_dimension


def _slices(instruction: Any) -> Iterator[int]:
    for part in ("start", "stride", "limit"):
        yield from sequence_features((getattr(d, part) for d in instruction.slice_dimensions), _KEPT_SLICES)
    yield from sequence_features(instruction.dynamic_slice_sizes, _KEPT_SLICES)
    for part in ("edge_padding_low", "edge_padding_high"):
        yield from sequence_features((getattr(d, part) for d in instruction.padding_config.dimensions), _KEPT_SLICES)


def _edges(module: Any) -> npt.NDArray[np.int64]:
    """Consumer to producer: each distinct operand once, and the root of every computation called; sorted."""
    nodes, roots = _number_nodes(module)
    edges: list[tuple[int, int]] = []
    for computation, local in zip(module.computations, nodes, strict=True):
        for instruction in computation.instructions:
            consumer = local[instruction.id]
            for operand in set(instruction.operand_ids):
                edges.append((consumer, _look_up(local, operand, "instruction", instruction)))
            for called in instruction.called_computation_ids:
                edges.append((consumer, _look_up(roots, called, "computation", instruction)))
    return np.array(sorted(edges), np.int64).reshape(-1, 2)


def _number_nodes(module: Any) -> tuple[list[dict[int, int]], dict[int, int]]:
    """For each computation its instructions' rows by id, and for each computation's id the row of its root."""
    nodes: list[dict[int, int]] = []
    roots: dict[int, int] = {}
    row = 0
    for computation in module.computations:
        local: dict[int, int] = {}
        for instruction in computation.instructions:
            if instruction.id in local:
                raise FileFormatError(f"The HLO module has two instructions with id {instruction.id}.")
            local[instruction.id] = row
            row += 1
        if computation.id in roots:
            raise FileFormatError(f"The HLO module has two computations with id {computation.id}.")
        if computation.root_id in local:
            roots[computation.id] = local[computation.root_id]
        nodes.append(local)
    return nodes, roots


def _look_up(table: dict[int, int], key: int, what: str, instruction: Any) -> int:
    if key not in table:
        raise FileFormatError(
            f"The HLO module's {instruction.opcode or 'unnamed'} instruction {instruction.id} refers to {what} {key}, "
            "which is missing or has no root."
        )
    return table[key]


def _padded(values: Iterable[int], kept: int) -> list[int]:
    first = list(values)[:kept]
    return first + [0] * (kept - len(first))


def _wrap(value: int) -> int:
    """`value` as a signed 64-bit integer."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
