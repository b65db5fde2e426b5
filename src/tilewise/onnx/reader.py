"""Reads an ONNX file into a `OnnxGraph`, believing nothing in it.

The `onnx` package parses the protobuf message; everything else is checked here: sizes against bytes before an array is
made, external data against the folder of the file, names, types, the version of the operations. Half-precision weights
(float16, bfloat16) become float32.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import sys
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from tilewise._files import convert_read_errors, open_input, read_input
from tilewise.errors import DtypeError, FileFormatError, TilewiseError, UnavailableError
from tilewise.onnx.graph import OnnxGraph, OnnxNode, Port, in_order
from tilewise.onnx.wire import Location, read_skeleton
from tilewise.tensor import Array

Weights = tuple[BufferedReader, list[Location | None]]  # a file, and the position of each initializer's data in it

OLDEST_OPSET = 13
_USUAL_OPSET = 21  # known to every onnx package that tilewise can be installed with
_MOST_BYTES = (1 << 31) - 1  # largest protobuf message
_MOST_NODES = 200_000
# ONNX's numbers of element types: dtype of the raw bytes, and dtype after reading.
_TYPES: dict[int, tuple[str, str]] = {
    1: ("<f4", "float32"),
    2: ("|u1", "uint8"),
    3: ("|i1", "int8"),
    4: ("<u2", "uint16"),
    5: ("<i2", "int16"),
    6: ("<i4", "int32"),
    7: ("<i8", "int64"),
    9: ("|b1", "bool"),
    10: ("<f2", "float32"),
    11: ("<f8", "float64"),
    12: ("<u4", "uint32"),
    13: ("<u8", "uint64"),
    16: ("<u2", "float32"),  # bfloat16: the upper half of a float32
}
_BFLOAT16, _FLOAT16 = 16, 10
_FIELDS = {1: "float_data", 11: "double_data", 7: "int64_data", 12: "uint64_data", 13: "uint64_data"}


def onnx_package() -> Any:
    """Import the `onnx` package, or raise an error that says how to install it."""
    try:
        import onnx
    except ImportError:
        raise UnavailableError(
            "reading and writing ONNX files needs the onnx package: pip install 'tilewise[onnx]'"
        ) from None
    return onnx


@functools.cache
def _messages() -> Any:
    """Import only the protobuf classes of the `onnx` package; the whole takes four times as long."""
    spec = None if "onnx" in sys.modules else importlib.util.find_spec("onnx")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "onnx_ml_pb2.py"
        own = importlib.util.spec_from_file_location("tilewise.onnx.messages", path) if path.is_file() else None
        if own is not None and own.loader is not None:
            module = importlib.util.module_from_spec(own)
            own.loader.exec_module(module)
            return module
    return onnx_package()


def one_line(text: str) -> str:
    """Replace unprintable characters of a text from a file, so that a message stays on one line."""
    return "".join(c if c.isprintable() else "?" for c in text)


def dtype_of(number: int, what: object) -> np.dtype[Any]:
    """Return the NumPy dtype of an ONNX element type; `what` is named in the error for an unsupported one."""
    if number not in _TYPES:
        names = {value: name.lower() for name, value in _messages().TensorProto.DataType.items()}
        kind = names.get(number, f"number {number}")
        raise DtypeError(f"{what} has the element type {kind}, which tilewise does not read")
    return np.dtype(_TYPES[number][1])


def read_graph(path: str | os.PathLike[str]) -> OnnxGraph:
    """Read the graph of an ONNX file."""
    where = Path(path)
    parse = _messages().ModelProto.FromString
    try:
        with open_input(where, _MOST_BYTES) as stream, convert_read_errors(where):
            skeleton = read_skeleton(stream)
            if skeleton is not None and isinstance(stream, BufferedReader):
                return _graph(parse(skeleton.message), where, (stream, skeleton.locations))
        return _graph(parse(read_input(where, _MOST_BYTES)), where)
    except TilewiseError as error:  # names come from the file
        raise type(error)(one_line(str(error))) from None
    except MemoryError:
        raise UnavailableError(f"{where} does not fit into the memory of this machine") from None
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError, AttributeError):
        raise FileFormatError(f"{where} is not a valid ONNX file") from None
    except Exception as error:  # each implementation of protobuf raises other exceptions
        if type(error).__module__.startswith("google.protobuf"):
            raise FileFormatError(f"{where} is not an ONNX file, or it is cut short or damaged") from None
        raise


def _graph(model: Any, where: Path, weights: Weights | None = None) -> OnnxGraph:
    """Convert a parsed model to an `OnnxGraph`, with nodes in execution order."""
    graph = model.graph
    if not graph.node and not graph.output:
        raise FileFormatError(f"{where} is not an ONNX file: there is no network in it")
    opset = _opset(model, where)
    if len(graph.node) > _MOST_NODES:
        raise FileFormatError(f"{where} has {len(graph.node)} nodes, more than the {_MOST_NODES} read here")
    constants = _Constants(where, weights)
    for index, tensor in enumerate(graph.initializer):
        constants.add(tensor.name, tensor, index)
    if graph.sparse_initializer:
        raise FileFormatError(f"{where} has sparse initializers, which tilewise does not read")
    inputs = tuple(_port(value, where) for value in graph.input if value.name not in constants.arrays)
    nodes = [_node(node, index, opset, constants) for index, node in enumerate(graph.node)]
    available = {*constants.arrays, *(port.name for port in inputs)}
    ordered = in_order(_without_constants(nodes, constants.arrays), available | set(constants.arrays), where)
    outputs = tuple(_port(value, where, typed=False) for value in graph.output)
    produced = available.union(constants.arrays, *(node.outputs for node in ordered))
    for port in outputs:
        if port.name not in produced:
            raise FileFormatError(f"{where}: no node produces the output {port.name!r}")
    return OnnxGraph(tuple(ordered), constants.arrays, inputs, outputs, opset)


def _opset(model: Any, where: Path) -> int:
    """Return the version of the standard operators; raise if it is not supported."""
    versions = [entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
    if not versions:
        raise FileFormatError(f"{where} does not state its opset version")
    # Newer versions are read as far as the installed package knows them.
    newest = _USUAL_OPSET if OLDEST_OPSET <= versions[0] <= _USUAL_OPSET else onnx_package().defs.onnx_opset_version()
    if not OLDEST_OPSET <= versions[0] <= newest:
        raise FileFormatError(
            f"{where} uses version {versions[0]} of the operations; {OLDEST_OPSET} to {newest} are read here "
            "(onnx.version_converter changes it)"
        )
    return int(versions[0])


def _port(value: Any, where: Path, typed: bool = True) -> Port:
    """Convert the description of an input or output; only outputs may lack a type (`typed=False`)."""
    kind = value.type.WhichOneof("value")
    if kind not in ("tensor_type", None) or (kind is None and typed):
        raise FileFormatError(f"{where}: {value.name!r} is not a tensor but {kind or 'nothing'}")
    tensor = value.type.tensor_type
    number = tensor.elem_type if kind and (typed or tensor.elem_type) else 1
    shape = None
    if kind and tensor.HasField("shape"):
        shape = tuple(
            int(d.dim_value) if d.HasField("dim_value") else (str(d.dim_param) or None) for d in tensor.shape.dim
        )
        if len(shape) > 32 or any(isinstance(d, int) and d < 0 for d in shape):
            raise FileFormatError(f"{where}: {value.name!r} has a shape that no tensor has")
    return Port(str(value.name), dtype_of(number, f"{where}: {value.name!r}"), shape)


def _node(node: Any, index: int, opset: int, constants: _Constants) -> OnnxNode:
    """Convert a protobuf node; a node without a name is named by its type and index."""
    op = str(node.op_type) if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"
    name = str(node.name) or f"{node.op_type}_{index}"
    attributes = {str(a.name): _attribute(a, name, constants) for a in node.attribute}
    return OnnxNode(name, op, tuple(map(str, node.input)), tuple(map(str, node.output)), attributes, opset)


_ATTRIBUTES: dict[int, Callable[[Any], Any]] = {
    1: lambda a: float(a.f),
    2: lambda a: int(a.i),
    3: lambda a: a.s.decode("utf-8", "replace"),
    6: lambda a: tuple(map(float, a.floats)),
    7: lambda a: tuple(map(int, a.ints)),
    8: lambda a: tuple(s.decode("utf-8", "replace") for s in a.strings),
}


def _attribute(attribute: Any, node: str, constants: _Constants) -> Any:
    """Convert a protobuf attribute to a Python value, according to its type code."""
    if attribute.type == 4:
        return constants.decode(attribute.t, f"the setting {attribute.name} of {node}")
    decode = _ATTRIBUTES.get(attribute.type)  # others are a graph or a type: of operations that are not supported
    return None if decode is None else decode(attribute)


def _without_constants(nodes: list[OnnxNode], constants: dict[str, Array]) -> list[OnnxNode]:
    """Remove Constant nodes, and add their values to `constants` under their results' names."""
    others = []
    for node in nodes:
        value = _constant_value(node) if node.op == "Constant" else None
        if value is None:
            others.append(node)
        elif len(node.outputs) != 1 or node.outputs[0] in constants:
            raise FileFormatError(f"{node} does not produce exactly one new value")
        else:
            constants[node.outputs[0]] = value
    return others


def _constant_value(node: OnnxNode) -> Array | None:
    """Return the array of a Constant node, or None if its attribute is not supported."""
    kinds = {"value": None, "value_float": np.float32, "value_int": np.int64}
    for name, kind in {**kinds, "value_floats": np.float32, "value_ints": np.int64}.items():
        if node.attributes.get(name) is not None:
            return np.asarray(node.attributes[name], kind)
    return None


class _Constants:
    """Decoder of a file's tensors, which may be in external files next to it."""

    def __init__(self, where: Path, weights: Weights | None) -> None:
        """Start without constants; `where` is the model's path, `weights` the raw data left in its file."""
        self.where, self.folder = where, where.parent
        self._stream = None if weights is None else weights[0]
        self._locations = [] if weights is None else weights[1]
        self.arrays: dict[str, Array] = {}
        self._readable_bytes: dict[Path, int] = {}  # bytes that may still be read of an external file

    def add(self, name: str, tensor: Any, index: int) -> None:
        """Decode a tensor of the file and store it under its name, which must be new."""
        if not name or name in self.arrays:
            raise FileFormatError(f"{self.where}: the weights {name!r} occur twice")
        location = self._locations[index] if index < len(self._locations) else None
        self.arrays[name] = self.decode(tensor, f"{self.where}: {name!r}", location)

    def decode(self, tensor: Any, what: str, location: Location | None = None) -> Array:
        """Decode a tensor after checking its data's size against its shape; `what` names it in errors."""
        dims = tuple(int(d) for d in tensor.dims)
        if tensor.data_type not in _TYPES:
            dtype_of(tensor.data_type, what)
        if len(dims) > 32 or any(d < 0 for d in dims) or tensor.HasField("segment"):
            raise FileFormatError(f"{what} has a shape that no tensor has")
        count, layout = math.prod(dims), np.dtype(_TYPES[tensor.data_type][0])
        if count == 0 and math.prod(d for d in dims if d) > 1 << 20:
            raise FileFormatError(f"{what} is empty but claims the shape {dims}")
        if location is not None and tensor.data_location != 1:
            return self._in_file(location, tensor.data_type, dims, what)
        if tensor.data_location == 1:
            raw: Any = self._external(tensor, count * layout.itemsize, what)
        elif tensor.HasField("raw_data"):
            raw = tensor.raw_data
        else:
            return self._from_field(tensor, dims, count, what)
        if len(raw) != count * layout.itemsize:
            raise FileFormatError(f"{what} of shape {dims} does not fill its {len(raw)} bytes")
        return _as_array(np.frombuffer(raw, layout), tensor.data_type).reshape(dims)

    def _in_file(self, location: Location, number: int, dims: tuple[int, ...], what: str) -> Array:
        """Read a tensor's raw data, which the skeleton left in the file, directly into an array."""
        (offset, size), layout = location, np.dtype(_TYPES[number][0])
        if size != math.prod(dims) * layout.itemsize:
            raise FileFormatError(f"{what} of shape {dims} does not fill its {size} bytes")
        assert self._stream is not None
        flat = np.empty(math.prod(dims), layout)
        self._stream.seek(offset)
        if self._stream.readinto(flat.view(np.uint8).data) != size:
            raise FileFormatError(f"{self.where} was cut short while it was read")
        return _as_array(flat, number, copy=False).reshape(dims)

    def _from_field(self, tensor: Any, dims: tuple[int, ...], count: int, what: str) -> Array:
        """Decode a tensor of `count` numbers from a typed field of its message, such as float_data."""
        values = getattr(tensor, _FIELDS.get(tensor.data_type, "int32_data"))
        if len(values) != count:
            raise FileFormatError(f"{what} of shape {dims} has {len(values)} numbers")
        if tensor.data_type in (_FLOAT16, _BFLOAT16):  # kept as the bits of each number
            bits = np.asarray(values, np.int64).astype("<u2")
            return _as_array(bits.view(_TYPES[tensor.data_type][0]), tensor.data_type).reshape(dims)
        flat = np.fromiter(values, _TYPES[tensor.data_type][0], count)
        return _as_array(flat, tensor.data_type).reshape(dims)

    def _external(self, tensor: Any, size: int, what: str) -> bytes:
        """Read `size` bytes of a tensor from an external file; raise if they are outside of it."""
        facts = {str(entry.key): str(entry.value) for entry in tensor.external_data}
        path = self._inside(facts.get("location", ""), what)
        offset, length = int(facts.get("offset", "0") or 0), int(facts.get("length", str(size)) or size)
        if length != size or offset < 0:
            raise FileFormatError(f"{what} does not fill the {length} bytes it has in {path.name}")
        with open_input(path, 1 << 40) as stream, convert_read_errors(path):
            there = os.fstat(stream.fileno()).st_size
            # Each byte may be used twice, by tied weights, and not a thousand times.
            budget_left = self._readable_bytes.setdefault(path, 2 * there) - size
            if offset + size > there or budget_left < 0:
                raise FileFormatError(
                    f"{what} is outside {path.name}, which is truncated, or whose bytes are used too often"
                )
            self._readable_bytes[path] = budget_left
            stream.seek(offset)
            return stream.read(size)

    def _inside(self, location: str, what: str) -> Path:
        """Return the path of an external file; raise unless it is in or below the model's folder."""
        relative = PurePosixPath(location)
        has_odd_characters = "\\" in location or "\0" in location
        if not location or has_odd_characters or relative.is_absolute() or ".." in relative.parts:
            raise FileFormatError(f"{what} points at {location[:80]!r}, which is not in the model's folder")
        path = self.folder / relative
        try:
            leads_away = not path.resolve().is_relative_to(self.folder.resolve())
        except (OSError, RuntimeError):  # links that lead in a circle
            leads_away = True
        if leads_away:
            raise FileFormatError(f"{what} points at {location[:80]!r}, a link that leads away from the model")
        return path


def _as_array(flat: Array, number: int, copy: bool = True) -> Array:
    """Convert a flat array of ONNX element type `number` to a supported dtype, writable if `copy`."""
    if number == _BFLOAT16:
        return (flat.astype(np.uint32) << 16).view(np.float32)
    return flat.astype(_TYPES[number][1], copy=copy)
