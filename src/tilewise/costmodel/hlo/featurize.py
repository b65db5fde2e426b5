"""Converts an HLO module or a JAX function to the graph that a cost model reads, bit for bit as in TpuGraphs' files.

`featurize_hlo` takes a serialized ``HloModuleProto`` and returns 140 numbers and an opcode per instruction, and an edge
per operand. All numbers are int64 until the end: sums and products wrap as in C++, and each is rounded to float32 once.
`featurize_jax` takes a JAX function, named as ``package.module:function``, and lowers it for the example arguments that
its module defines as ``<function>_args`` (a tuple, or a function that returns one); nothing is compiled.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.schema import DIMENSIONS, ELEMENT_TYPES, NODE_FEATURES, OPCODE_NUMBER, WINDOW_FIELDS
from tilewise.costmodel.hlo.graph import KernelGraph, pad_sequence, sequence_features
from tilewise.errors import ConfigurationError, FileFormatError, UnavailableError

MAX_INSTRUCTIONS = 1_000_000

# XLA's numbers of the element types (xla_data.proto, PrimitiveType), in the order of the one-hot columns.
_TYPE_NUMBERS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16, 15, 18, 13, 14, 17)
_TYPE_COLUMN = {number: column for column, number in enumerate(_TYPE_NUMBERS)}
_SLICE_DIMENSIONS = 2  # columns per list of a slice or padding
_SPATIAL_DIMENSIONS = 4  # columns per list of a convolution's spatial dimensions


def featurize_hlo(serialized_module: bytes) -> KernelGraph:
    """Return the graph of a serialized ``HloModuleProto``.

    >>> node_feat, node_opcode, edge_index = featurize_hlo(path.read_bytes())  # doctest: +SKIP
    """
    hlo_pb2 = protobuf_classes("hlo_pb2")
    return featurize_module(parse_message(hlo_pb2.HloModuleProto(), serialized_module, "The HLO module"))


def featurize_module(module: Any) -> KernelGraph:
    """Return the graph of a parsed ``HloModuleProto``, with nodes in the order of computations and instructions."""
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
    return KernelGraph(numbers.astype(np.float32), opcodes, _edges(module))


def protobuf_classes(name: str) -> Any:
    """Return the message classes of one of the files in `proto`; raise `UnavailableError` if protobuf is missing."""
    try:
        return getattr(importlib.import_module("tilewise.costmodel.hlo.proto"), name)
    except ImportError as error:
        raise UnavailableError("Reading HLO needs protobuf: pip install 'tilewise[train]'.") from error


def parse_message(message: Any, content: bytes, what: str) -> Any:
    """Parse `content` into `message`; raise `FileFormatError` if it is damaged in any way."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    if not isinstance(content, bytes | bytearray | memoryview):
        raise FileFormatError(f"{what} must be given as bytes, not {type(content).__name__}.")
    try:
        message.ParseFromString(bytes(content))
    except (DecodeError, RecursionError, UnicodeDecodeError, ValueError, MemoryError) as error:
        raise FileFormatError(f"{what} is not a readable protobuf message ({type(error).__name__}).") from error
    return message


def _features(instruction: Any, is_root: bool) -> list[int]:
    """Return the 140 numbers of an instruction in the order of `NODE_FEATURES`; column 1 is always zero."""
    return [
        int(is_root),
        0,
        *_shape(instruction.shape),
        instruction.parameter_number,
        *pad_sequence(instruction.dimensions, DIMENSIONS),
        *_window(instruction.window.dimensions),
        *_convolution(instruction.convolution_dimension_numbers),
        instruction.feature_group_count,
        instruction.batch_group_count,
        *_slices(instruction),
        int(instruction.is_stable),
        *pad_sequence(instruction.shape.layout.minor_to_major, DIMENSIONS),
    ]


def _shape(shape: Any) -> Iterator[int]:
    """Yield the element type as one-hot columns, the dimensions, and the number of tuple elements."""
    one_hot = [0] * len(ELEMENT_TYPES)
    column = _TYPE_COLUMN.get(shape.element_type)
    if column is not None:  # types that are newer than TpuGraphs have no column
        one_hot[column] = 1
    yield from one_hot
    yield from sequence_features(shape.dimensions, DIMENSIONS)
    yield len(shape.tuple_shapes)


def _window(dimensions: Any) -> Iterator[int]:
    """Yield the columns of a convolution's or pooling's window."""
    for name in WINDOW_FIELDS:
        yield from sequence_features((getattr(dimension, name) for dimension in dimensions), DIMENSIONS)
    # Reversal is a flag: its columns end with counts instead of a sum and a product.
    reversed_dimensions = [int(dimension.window_reversal) for dimension in dimensions]
    yield from pad_sequence(reversed_dimensions, DIMENSIONS)
    yield sum(reversed_dimensions)
    yield len(reversed_dimensions) - sum(reversed_dimensions)


def _convolution(numbers: Any) -> Iterator[int]:
    """Yield the positions of a convolution's batch, feature and spatial dimensions."""
    yield numbers.input_batch_dimension
    yield numbers.input_feature_dimension
    yield from pad_sequence(numbers.input_spatial_dimensions, _SPATIAL_DIMENSIONS)
    yield numbers.kernel_input_feature_dimension
    yield numbers.kernel_output_feature_dimension
    yield from pad_sequence(numbers.kernel_spatial_dimensions, _SPATIAL_DIMENSIONS)
    yield numbers.output_batch_dimension
    yield numbers.output_feature_dimension


def _slices(instruction: Any) -> Iterator[int]:
    """Yield the columns of slices, dynamic slices and padding."""
    for name in ("start", "stride", "limit"):
        yield from sequence_features((getattr(d, name) for d in instruction.slice_dimensions), _SLICE_DIMENSIONS)
    yield from sequence_features(instruction.dynamic_slice_sizes, _SLICE_DIMENSIONS)
    padding = instruction.padding_config.dimensions
    for name in ("edge_padding_low", "edge_padding_high"):
        yield from sequence_features((getattr(dimension, name) for dimension in padding), _SLICE_DIMENSIONS)


def _edges(module: Any) -> npt.NDArray[np.int64]:
    """Return sorted edges from consumer to producer: each distinct operand, and the root of a called computation."""
    rows_by_id, roots = _number_nodes(module)
    edges: list[tuple[int, int]] = []
    for computation, rows in zip(module.computations, rows_by_id, strict=True):
        for instruction in computation.instructions:
            consumer = rows[instruction.id]
            # An operand that is used twice has one edge.
            for operand in set(instruction.operand_ids):
                edges.append((consumer, _look_up(rows, operand, "instruction", instruction)))
            for callee in instruction.called_computation_ids:
                edges.append((consumer, _look_up(roots, callee, "computation", instruction)))
    return np.array(sorted(edges), np.int64).reshape(-1, 2)


def _number_nodes(module: Any) -> tuple[list[dict[int, int]], dict[int, int]]:
    """Number a module's instructions: return each one's row by id, per computation, and each root's row."""
    rows_by_id: list[dict[int, int]] = []
    roots: dict[int, int] = {}
    row = 0
    for computation in module.computations:
        # Ids of instructions are unique within a computation only.
        rows: dict[int, int] = {}
        for instruction in computation.instructions:
            if instruction.id in rows:
                raise FileFormatError(f"The HLO module has two instructions with id {instruction.id}.")
            rows[instruction.id] = row
            row += 1
        if computation.id in roots:
            raise FileFormatError(f"The HLO module has two computations with id {computation.id}.")
        # A call has an edge to the result of the called computation.
        if computation.root_id in rows:
            roots[computation.id] = rows[computation.root_id]
        rows_by_id.append(rows)
    return rows_by_id, roots


def _look_up(table: dict[int, int], key: int, what: str, instruction: Any) -> int:
    """Return the row of id `key` in `table`.

    Raise `FileFormatError`, naming `what` it is for `instruction`, if missing.
    """
    if key not in table:
        raise FileFormatError(
            f"The HLO module's {instruction.opcode or 'unnamed'} instruction {instruction.id} refers to {what} {key}, "
            "which is missing or has no root."
        )
    return table[key]


def featurize_jax(target: str) -> KernelGraph:
    """Return the graph of the function named ``module:function``.

    >>> graph = featurize_jax("my_models.mlp:forward")  # doctest: +SKIP
    """
    return featurize_hlo(serialize_jax(target))


def serialize_jax(target: str) -> bytes:
    """Return the serialized ``HloModuleProto`` of the function named ``module:function``."""
    jax = _jax()
    function, arguments = _load(target)
    try:
        # Lowering stops before the compiler: HLO as JAX emits it, without fusions.
        lowering = jax.jit(function).lower(*arguments)
        module = lowering.compiler_ir(dialect="hlo")
        return bytes(module.as_serialized_hlo_module_proto())
    except Exception as error:  # the user's function runs here and may raise anything
        raise ConfigurationError(f"JAX could not lower {target}: {_first_line(error)}") from error


def _jax() -> Any:
    """Import JAX; raise `UnavailableError` if it is not installed."""
    try:
        return importlib.import_module("jax")
    except ImportError as error:
        raise UnavailableError("Reading a JAX function needs JAX: pip install jax.") from error


def _load(target: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Import ``module:function`` and return the function and its example arguments, `function_args` of the module."""
    module_name, _, function_name = target.partition(":")
    if not module_name or not function_name.isidentifier():
        raise ConfigurationError(f"{target!r} does not name a function; write package.module:function.")
    # A console script does not have the current folder on its path, where the user's module usually is.
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module runs here and may raise anything
        raise ConfigurationError(f"{module_name} cannot be imported: {_first_line(error)}") from error
    function = getattr(module, function_name, None)
    arguments = getattr(module, f"{function_name}_args", None)
    if not callable(function):
        raise ConfigurationError(f"{module_name} has no function {function_name}.")
    arguments = arguments() if callable(arguments) else arguments
    if not isinstance(arguments, tuple):
        raise ConfigurationError(f"{module_name} must define example arguments as the tuple {function_name}_args.")
    return function, arguments


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
