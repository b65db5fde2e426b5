"""Collects nodes and weights of an ONNX graph and writes the file. Values go by their names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilewise._atomic import write_atomic
from tilewise.errors import DtypeError, FileFormatError
from tilewise.graph.ir import Array, unique_name
from tilewise.onnx.graph import Port
from tilewise.onnx.reader import onnx_package

OPSET = 17
_IR_VERSION = 9
_MOST_BYTES = (1 << 31) - (1 << 20)  # of one protobuf message


_AXES_AS_INPUT, _REDUCTIONS = 18, ("ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd")  # an attribute before


class OnnxWriter:
    """Collects the nodes and weights of an ONNX graph under construction, and writes its file."""

    def __init__(self, opset: int = OPSET) -> None:
        """Start an empty graph for this version of the operators."""
        self.onnx, self.opset = onnx_package(), opset
        self.nodes: list[Any] = []
        self.weights: dict[str, Array] = {}
        self._names: set[str] = set()
        self._constants: dict[tuple[Any, ...], str] = {}
        self._alive: list[Array] = []

    def name(self, preferred: str) -> str:
        """Return `preferred`, or a similar name if that is in use."""
        return unique_name(preferred, self._names, "_")

    def node(self, op: str, inputs: Sequence[str], outputs: int | Sequence[str] = 1, **attributes: Any) -> Any:
        """Add a node; return the name of its result, or a list of names if several were requested."""
        names = [self.name(f"{op}_{len(self.nodes)}") for _ in range(outputs)] if isinstance(outputs, int) else outputs
        settings = {name: value for name, value in attributes.items() if value is not None}
        if op in _REDUCTIONS and self.opset >= _AXES_AS_INPUT and "axes" in settings:
            inputs = [*inputs, self.constant(settings.pop("axes"))]
        self.nodes.append(
            self.onnx.helper.make_node(op, list(inputs), list(names), f"{op}_{len(self.nodes)}", **settings)
        )
        return names[0] if len(names) == 1 else list(names)

    def weight(self, array: Array, name: str) -> str:
        """Add an array as a constant and return its name; the same array is written once."""
        key = (id(array),)
        if key not in self._constants:
            self._alive.append(array)
            self._constants[key] = self.name(name)
            self.weights[self._constants[key]] = array
        return self._constants[key]

    def constant(self, values: Any, dtype: Any = np.int64) -> str:
        """Add a small constant and return its name; equal constants are written once."""
        array = np.asarray(values, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.name(f"constant_{len(self.weights)}")
            self.weights[self._constants[key]] = array
        return self._constants[key]

    def write(self, path: str | os.PathLike[str], inputs: Sequence[Port], outputs: Sequence[Port]) -> None:
        """Write the graph with these inputs and outputs to an ONNX file, atomically."""
        helper = self.onnx.helper
        names_read = {name for node in self.nodes for name in node.input}.union(port.name for port in outputs)
        self.weights = {name: a for name, a in self.weights.items() if name in names_read}
        size = sum(a.nbytes for a in self.weights.values())
        if size > _MOST_BYTES:
            raise FileFormatError(f"{size} bytes of weights are more than one ONNX file holds")
        graph = helper.make_graph(
            self.nodes,
            "tilewise",
            [self._info(port) for port in inputs],
            [self._info(port) for port in outputs],
            [self.onnx.numpy_helper.from_array(np.asarray(a, order="C"), n) for n, a in self.weights.items()],
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", self.opset)],
            ir_version=_IR_VERSION if self.opset <= 20 else 10,
            producer_name="tilewise",
        )
        write_atomic(Path(path), model.SerializeToString())

    def type_of(self, dtype: np.dtype[Any]) -> int:
        """Return ONNX's number of a data type."""
        try:
            return int(self.onnx.helper.np_dtype_to_tensor_dtype(dtype))
        except (KeyError, ValueError):
            raise DtypeError(f"{dtype} has no form in ONNX") from None

    def _info(self, port: Port) -> Any:
        shape = None if port.shape is None else list(port.shape)
        return self.onnx.helper.make_tensor_value_info(port.name, self.type_of(port.dtype), shape)
