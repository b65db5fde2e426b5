"""Traced operations as JSON and arrays, and the model that replays them.

A quantized network holds operations that have no integer form, and dynamically quantized networks are made of them.
Both are stored as the trace recorded them: the operation's name, what it reads, its parameters. Names are looked up
among tilewise's own operations, so a file cannot name any other code.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tilewise.errors import ConfigurationError, ShapeError
from tilewise.graph.ir import Array, Node, Trace, Value
from tilewise.graph.trace import trace
from tilewise.nn import Module
from tilewise.nn.resampling import Taps
from tilewise.ops.base import Operation
from tilewise.quantize.graph import (
    BatchInteger,
    RepeatedConstant,
    at_batch,
    attempt,
    follow_batch,
    larger_images,
    same_nodes,
)
from tilewise.quantize.layers import QuantizedLinear
from tilewise.tensor import Tensor, apply, no_grad

# Operations that hold functions or random generators, which are not data.
_NOT_STORED = ("Computed", "Dropout")
_OPERATION_MODULES = (
    "ops.activations", "ops.elementwise", "ops.matmul", "ops.reductions", "ops.shapes", "nn.primitives",
    "nn.recurrent", "nn.resampling", "onnx.operators",
)  # fmt: skip
_LARGEST_NESTING = 8  # of tuples in a file's parameters; arbitrary, rejects hostile files


def operations() -> dict[str, type[Operation]]:
    """Return tilewise's operations by name.

    A process that loads a file may not have imported the modules that define them.
    """
    for module in _OPERATION_MODULES:
        importlib.import_module(f"tilewise.{module}")
    classes: list[type[Operation]] = [Operation]
    by_name: dict[str, type[Operation]] = {}
    while classes:
        for subclass in classes.pop().__subclasses__():
            classes.append(subclass)
            if subclass.__module__.startswith("tilewise.") and subclass.__name__ not in _NOT_STORED:
                by_name[subclass.__name__] = subclass
    return by_name


# --- writing ---


class NodeWriter:
    """Encodes nodes; arrays are collected in `arrays` under names that begin with `prefix`."""

    def __init__(self, arrays: dict[str, Array], prefix: str) -> None:
        self._arrays, self._prefix, self._operations = arrays, prefix, operations()

    def node(self, node: Node) -> dict[str, Any]:
        """Encode an operation as JSON."""
        name = node.operation.__name__
        if self._operations.get(name) is not node.operation:
            raise ConfigurationError(f"{node.layer or name} runs {name}, which cannot be written to a file")
        return {
            "op": name,
            "inputs": [self._value(value) for value in node.inputs],
            "params": {key: self._value(value) for key, value in node.params.items()},
            "layer": node.layer,
            "shape": list(node.shape),
            "dtype": str(node.dtype),
        }

    def _value(self, value: Any) -> Any:
        """Encode an operand or a parameter as JSON."""
        if isinstance(value, bool | int | str | float) or value is None:
            return value
        if isinstance(value, tuple | list):
            return {"tuple" if isinstance(value, tuple) else "list": [self._value(v) for v in value]}
        if isinstance(value, slice):
            return {"slice": [self._value(end) for end in (value.start, value.stop, value.step)]}
        if isinstance(value, Value):
            return {"value": value.number}
        if value is Ellipsis:
            return {"ellipsis": True}
        if isinstance(value, Taps):
            return {"taps": [self._array(value.positions), self._array(value.weights)]}
        if isinstance(value, QuantizedLinear) and value.input is None:
            bias = None if value.float_bias is None else self._array(value.float_bias)
            q = self._array(np.ascontiguousarray(value.kernel.weights()[:, 0, 0, : value.in_features]))
            return {"linear": [q, self._array(value.weight_scale), bias, value.activation]}
        if isinstance(value, np.ndarray | np.generic):
            return self._array(np.asarray(value))
        if isinstance(value, type | np.dtype):
            return {"dtype": str(np.dtype(value))}
        if isinstance(value, BatchInteger):
            return {"batch": [value.each, value.fixed]}
        if isinstance(value, RepeatedConstant):
            array = self._array(value.array)
            return {"repeated": array if value.axis == 0 else [array, value.axis]}
        raise ConfigurationError(f"a parameter of type {type(value).__name__} cannot be written to a file")

    def _array(self, array: Array) -> dict[str, str]:
        """Store an array and return its reference; a transposed view is marked, to be read back in the same order."""
        name, array = f"{self._prefix}{len(self._arrays)}", np.asarray(array)
        is_transposed = array.ndim == 2 and array.T.flags.c_contiguous and not array.flags.c_contiguous
        self._arrays[name] = array.T if is_transposed else array
        return {"transposed" if is_transposed else "array": name}


# --- reading ---


class NodeReader:
    """Decodes operations that NodeWriter wrote; integers that follow the batch become `BatchInteger`."""

    def __init__(self, arrays: dict[str, Array]) -> None:
        self._arrays, self._operations = arrays, operations()

    def node(self, entry: dict[str, Any]) -> Node:
        """Decode one operation from its JSON."""
        if entry["op"] == "Choose":  # the name in version 0.1.0 of a Where whose condition is computed
            condition, *inputs = entry["inputs"]
            entry = {**entry, "op": "Where", "inputs": inputs, "params": {"condition": condition}}
        return Node(
            operation=self._operations[str(entry["op"])],
            inputs=tuple(self._value(v) for v in entry["inputs"]),
            params={str(key): self._value(value) for key, value in entry["params"].items()},
            layer=str(entry["layer"]),
            shape=tuple(int(n) for n in entry["shape"]),
            input_shapes=(),
            dtype=np.dtype(str(entry["dtype"])),
        )

    def _value(self, value: Any, depth: int = 0) -> Any:
        """Decode a parameter: a plain JSON value, or a dictionary whose only key names the type."""
        if not isinstance(value, dict):
            if isinstance(value, list) or depth > _LARGEST_NESTING:
                raise ValueError
            return value
        ((kind, content),) = value.items()
        if kind in ("tuple", "list"):
            items = [self._value(v, depth + 1) for v in content]
            return tuple(items) if kind == "tuple" else items
        decoders: dict[str, Callable[[Any], Any]] = {
            "slice": lambda ends: slice(*(self._value(v, depth + 1) for v in ends)),
            "value": lambda number: Value(int(number)),
            "ellipsis": lambda _: Ellipsis,
            "array": self._arrays.__getitem__,
            "transposed": lambda name: self._arrays[name].T,
            "dtype": lambda name: np.dtype(str(name)),
            "batch": lambda pair: BatchInteger(int(pair[0]), int(pair[1])),
            "repeated": self._repeated,
            "taps": lambda arrays: Taps(*(self._value(v) for v in arrays)),
            "linear": self._linear,
        }
        return decoders[kind](content)

    def _repeated(self, content: Any) -> RepeatedConstant:
        """Decode a repeated constant: its array, or that and the axis if it is not the first."""
        array, axis = content if isinstance(content, list) else (content, 0)
        return RepeatedConstant(self._value(array), int(axis))

    def _linear(self, content: list[Any]) -> QuantizedLinear:
        """Rebuild a linear layer from its stored integers, scales, bias and activation."""
        q, scale, bias, activation = content
        arrays = [None if array is None else self._value(array) for array in (q, scale, bias)]
        return QuantizedLinear.from_integers(*arrays, activation=str(activation))


# --- models that are a list of operations ---


class TracedModel(Module):
    """A dynamically quantized network read from a file: its operations, replayed one by one."""

    computes_in_int8 = True

    def __init__(
        self,
        nodes: list[Node],
        result: int,
        inputs: list[tuple[str, tuple[int, ...]]],
        any_batch: bool,
        any_size: bool,
    ) -> None:
        """Store the operations; `result` is the number of the last value.

        `inputs` are the dtype and shape of each example that the network was traced with. With `any_batch` and
        `any_size` the operations hold for another batch, and for images of another size.
        """
        self.nodes, self.result, self.inputs, self.any_batch, self.any_size = nodes, result, inputs, any_batch, any_size
        self.linear_layers = [v for node in nodes for v in node.params.values() if isinstance(v, QuantizedLinear)]
        self.training = False
        count = len(inputs)
        for number, node in enumerate(nodes, count):
            if any(not 0 <= v.number < number for v in node.reads()):
                raise ValueError
            # A damaged file may give an operation too few arguments, or some it does not take: a TypeError.
            operation: Any = node.operation
            inspect.signature(operation.forward).bind(None, *node.inputs, **node.params)
        if not 0 <= result < count + len(nodes):
            raise ValueError

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Yield the integer layers, which are parameters of operations, as if they were submodules."""
        return ((f"linear_layers.{index}", layer) for index, layer in enumerate(self.linear_layers))

    def holds_weights(self) -> bool:
        """Return True: the operations hold weights besides those of integer layers, such as convolutions'."""
        return True

    def forward(self, *inputs: Any) -> Tensor:
        """Replay the operations on the inputs; each value is freed after its last use."""
        if len(inputs) != len(self.inputs):
            raise ShapeError(f"this network takes {len(self.inputs)} inputs, not {len(inputs)}")
        values: dict[int, Tensor] = {}
        for number, (x, (dtype, _)) in enumerate(zip(inputs, self.inputs, strict=True)):
            is_right = isinstance(x, Tensor) and x.dtype == dtype
            values[number] = x if is_right else Tensor(np.ascontiguousarray(x, dtype))
        self._check_shapes([x.shape for x in values.values()])
        batch = values[0].shape[0] if values[0].ndim else 0
        uses = self._last_uses()
        for number, node in enumerate(self.nodes, len(self.inputs)):
            tensors = [values[v.number] if isinstance(v, Value) else _constant(v, batch) for v in node.inputs]
            params = {
                name: values[v.number].data if isinstance(v, Value) else at_batch(v, batch)
                for name, v in node.params.items()
            }
            values[number] = apply(node.operation, *tensors, **params)
            for done in uses.get(number, ()):
                del values[done]
        return values[self.result]

    def _check_shapes(self, shapes: list[tuple[int, ...]]) -> None:
        """Raise ShapeError for inputs of shapes that the operations do not hold for."""
        for shape, (_, expected) in zip(shapes, self.inputs, strict=True):
            # Of images of any size (N, C, H, W), the channels are fixed.
            fixed = 2 if self.any_size else len(expected)
            if len(shape) != len(expected) or shape[1:fixed] != expected[1:fixed]:
                raise ShapeError(
                    f"this network was saved for inputs of (N, {', '.join(map(str, expected[1:]))}), and cannot take "
                    f"{shape}: save it with an example of that size"
                )
            if shape[:1] != (shapes[0] if self.any_batch else expected)[:1]:
                raise ShapeError(
                    f"this network takes {'one batch size' if self.any_batch else f'batches of {expected[0]}'}, "
                    f"and cannot take {shape}"
                )

    def _last_uses(self) -> dict[int, list[int]]:
        """Return, for each operation's number, the values that it is the last to read."""
        # Later readers overwrite earlier ones; the result is never dropped.
        last: dict[int, int] = {}
        for number, node in enumerate(self.nodes, len(self.inputs)):
            last |= {v.number: number for v in node.reads()}
        last.pop(self.result, None)
        uses: dict[int, list[int]] = {}
        for value, number in last.items():
            uses.setdefault(number, []).append(value)
        return uses

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        values = [v for node in self.nodes for v in (*node.inputs, *node.params.values())]
        return sum(int(v.nbytes) for v in values if isinstance(v, np.ndarray | QuantizedLinear | RepeatedConstant))


def _constant(value: Any, batch: int) -> Any:
    return None if value is None else Tensor(np.asarray(at_batch(value, batch)))


def encode_trace(model: Module, examples: list[Array], arrays: dict[str, Array]) -> dict[str, Any]:
    """Encode the operations of a dynamically quantized model as JSON, and add its weights to `arrays` by name.

    `examples` has one array per input, whose first dimension is the batch.
    """
    first, batches = _traced(model, examples), (len(examples[0]), len(examples[0]) + 1)
    if not isinstance(first.result, Value):
        raise ConfigurationError("the result of this network does not depend on its input through tensors")
    # A second trace, with one more input, shows which sizes follow the batch; a third one whether images may be larger.
    nodes, more = first.nodes, attempt(_traced, model, [np.concatenate([x, x[:1]]) for x in examples])
    if more is not None:
        if len(more.nodes) != len(nodes):
            raise ConfigurationError("this network computes something else for another batch, so it cannot be written")
        nodes = [follow_batch(node, twin, batches) for node, twin in zip(nodes, more.nodes, strict=True)]
    larger = attempt(_traced, model, list(map(larger_images, examples)))
    any_size = larger is not None and same_nodes(first.nodes, larger.nodes)
    writer = NodeWriter(arrays, "n")
    return {
        "nodes": [writer.node(node) for node in nodes],
        "result": first.result.number,
        "inputs": [[str(x.dtype), list(x.shape)] for x in examples],
        "any_batch": more is not None,
        "any_size": any_size,
    }


def _traced(model: Module, examples: list[Array]) -> Trace:
    """Trace a model on examples for saving; broadcasts that depend on the batch are always recorded."""
    with no_grad():
        return trace(model, *examples, always_record=("Expand",))  # a class token is repeated for the batch


def decode_trace(facts: dict[str, Any], arrays: dict[str, Array]) -> TracedModel:
    """Decode a model that `encode_trace` encoded."""
    reader: Callable[[dict[str, Any]], Node] = NodeReader(arrays).node
    inputs = [(str(np.dtype(dtype)), tuple(int(n) for n in shape)) for dtype, shape in facts["inputs"]]
    nodes = [reader(entry) for entry in facts["nodes"]]
    # Files of version 0.1.0 do not say what they hold for; their networks were meant for any batch.
    any_batch, any_size = bool(facts.get("any_batch", True)), bool(facts.get("any_size", False))
    return TracedModel(nodes, int(facts["result"]), inputs, any_batch, any_size)
