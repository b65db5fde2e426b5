"""Traced operations as JSON and arrays, and the model that replays them.

A quantized network holds operations that have no integer form, and dynamically quantized networks are made of them.
Both are stored as the trace recorded them: the operation's name, what it reads, its parameters. Names are looked up
among tilewise's own operations, so a file cannot name any other code. Parameters that follow the batch (the shape of a
reshape) are found by tracing twice with different batch sizes.
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

    def node(self, node: Node, other: Node | None = None, batches: tuple[int, int] = (0, 0)) -> dict[str, Any]:
        """Encode an operation as JSON; `other` is its trace at a second batch size, `batches` are both sizes."""
        name = node.operation.__name__
        if self._operations.get(name) is not node.operation:
            raise ConfigurationError(f"{node.layer or name} runs {name}, which cannot be written to a file")
        others = (other.inputs, other.params) if other is not None else (node.inputs, node.params)
        self._batches = batches
        return {
            "op": name,
            "inputs": [self._value(a, b) for a, b in zip(node.inputs, others[0], strict=True)],
            "params": {key: self._value(value, others[1][key]) for key, value in node.params.items()},
            "layer": node.layer,
            "shape": list(node.shape),
            "dtype": str(node.dtype),
        }

    def _value(self, value: Any, other: Any) -> Any:
        """Encode a parameter as JSON; `other` is its value in a trace with another batch size."""
        if isinstance(value, bool | str | float) or value is None:
            return value
        if isinstance(value, int):
            return value if value == other else self._batch_size(value, other)
        if isinstance(value, tuple | list):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [self._value(a, b) for a, b in zip(value, other, strict=True)]}
        if isinstance(value, slice):
            ends = [(getattr(value, end), getattr(other, end)) for end in ("start", "stop", "step")]
            return {"slice": [self._value(a, b) for a, b in ends]}
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
            if isinstance(other, np.ndarray) and other.shape != np.shape(value):
                return self._repeated(np.asarray(value), other)
            return self._array(np.asarray(value))
        if isinstance(value, type | np.dtype):
            return {"dtype": str(np.dtype(value))}
        raise ConfigurationError(f"a parameter of type {type(value).__name__} cannot be written to a file")

    def _batch_size(self, value: int, other: int) -> dict[str, Any]:
        """Encode an integer that depends on the batch size, from its values at two sizes."""
        first, second = self._batches
        each, remainder = divmod(other - value, second - first)
        if remainder:
            raise ConfigurationError("a size of this network follows the batch in a way that cannot be written")
        return {"batch": [each, value - each * first]}

    def _repeated(self, value: Array, other: Array) -> dict[str, Any]:
        """Encode a constant (batch, ...) whose entries are equal, such as position embeddings, by its first."""
        # Every entry must equal the first one, in both traces.
        follows = (len(value), len(other)) == self._batches and value.shape[1:] == other.shape[1:]
        if not follows or (value != value[:1]).any() or (other != value[:1]).any():
            raise ConfigurationError("a constant of this network depends on the batch, so it cannot be written")
        return {"repeated": self._array(np.ascontiguousarray(value[:1]))}

    def _array(self, array: Array) -> dict[str, str]:
        """Store an array, a transposed view as one: a product's rounding depends on the memory order."""
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
            "repeated": lambda array: RepeatedConstant(self._value(array)),
            "taps": lambda arrays: Taps(*(self._value(v) for v in arrays)),
            "linear": self._linear,
        }
        return decoders[kind](content)

    def _linear(self, content: list[Any]) -> QuantizedLinear:
        """Rebuild a linear layer from its stored integers, scales, bias and activation."""
        q, scale, bias, activation = content
        arrays = [None if array is None else self._value(array) for array in (q, scale, bias)]
        return QuantizedLinear.from_integers(*arrays, activation=str(activation))


class BatchInteger:
    """An integer that follows the batch: `each` per image plus `fixed`."""

    def __init__(self, each: int, fixed: int) -> None:
        self.each, self.fixed = each, fixed

    def at(self, batch: int) -> int:
        return self.each * batch + self.fixed


class RepeatedConstant:
    """A constant with one entry of shape (1, ...) that is repeated for every image of the batch."""

    def __init__(self, array: Array) -> None:
        if not isinstance(array, np.ndarray) or array.shape[:1] != (1,):
            raise ValueError
        self.array, self.nbytes = array, array.nbytes

    def at(self, batch: int) -> Array:
        return np.broadcast_to(self.array, (batch, *self.array.shape[1:]))


def _resolve_batch(value: Any, batch: int) -> Any:
    """Replace every `BatchInteger` and `RepeatedConstant` in `value`, recursively, by its value for `batch`."""
    if isinstance(value, BatchInteger | RepeatedConstant):
        return value.at(batch)
    if isinstance(value, tuple | list):
        return type(value)(_resolve_batch(v, batch) for v in value)
    if isinstance(value, slice):
        return slice(*(_resolve_batch(end, batch) for end in (value.start, value.stop, value.step)))
    return value


# --- models that are a list of operations ---


class TracedModel(Module):
    """A dynamically quantized network read from a file: its operations, replayed one by one."""

    computes_in_int8 = True

    def __init__(self, nodes: list[Node], result: int, inputs: list[tuple[str, tuple[int, ...]]]) -> None:
        """Store the operations; `result` is the number of the last value.

        `inputs` are the dtype and shape of each example that the network was traced with.
        """
        self.nodes, self.result, self.inputs = nodes, result, inputs
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
        for number, (x, (dtype, shape)) in enumerate(zip(inputs, self.inputs, strict=True)):
            is_right = isinstance(x, Tensor) and x.dtype == dtype
            values[number] = x if is_right else Tensor(np.ascontiguousarray(x, dtype))
            if values[number].ndim != len(shape):
                raise ShapeError(f"this network takes inputs of {len(shape)} axes, not {values[number].shape}")
        # Sizes that follow the batch are computed from that of the first input.
        batch = values[0].shape[0] if values[0].ndim else 0
        uses = self._last_uses()
        for number, node in enumerate(self.nodes, len(self.inputs)):
            tensors = [values[v.number] if isinstance(v, Value) else _constant(v, batch) for v in node.inputs]
            params = {
                name: values[v.number].data if isinstance(v, Value) else _resolve_batch(v, batch)
                for name, v in node.params.items()
            }
            values[number] = apply(node.operation, *tensors, **params)
            for done in uses.get(number, ()):
                del values[done]
        return values[self.result]

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
    return None if value is None else Tensor(np.asarray(_resolve_batch(value, batch)))


def encode_trace(model: Module, examples: list[Array], arrays: dict[str, Array]) -> dict[str, Any]:
    """Encode the operations of a dynamically quantized model as JSON, and add its weights to `arrays` by name.

    `examples` has one array per input, whose first dimension is the batch.
    """
    first, batches = _traced(model, examples), (len(examples[0]), len(examples[0]) + 1)
    # The second trace, with one more image, shows which sizes follow the batch.
    other: Trace | None = None
    try:
        other = _traced(model, [np.concatenate([x, x[:1]]) for x in examples])
    except Exception:  # a network that takes one batch size only raises anything
        other = None
    if other is not None and [n.operation for n in other.nodes] != [n.operation for n in first.nodes]:
        raise ConfigurationError("this network computes something else for another batch, so it cannot be written")
    if not isinstance(first.result, Value):
        raise ConfigurationError("the result of this network does not depend on its input through tensors")
    writer = NodeWriter(arrays, "n")
    others = first.nodes if other is None else other.nodes
    nodes = [writer.node(node, twin, batches) for node, twin in zip(first.nodes, others, strict=True)]
    inputs = [[str(x.dtype), list(x.shape)] for x in examples]
    return {"nodes": nodes, "result": first.result.number, "inputs": inputs}


def _traced(model: Module, examples: list[Array]) -> Trace:
    """Trace a model on examples for saving; broadcasts that depend on the batch are always recorded."""
    with no_grad():
        return trace(model, *examples, always_record=("Expand",))  # a class token is repeated for the batch


def decode_trace(facts: dict[str, Any], arrays: dict[str, Array]) -> TracedModel:
    """Decode a model that `encode_trace` encoded."""
    reader: Callable[[dict[str, Any]], Node] = NodeReader(arrays).node
    inputs = [(str(np.dtype(dtype)), tuple(int(n) for n in shape)) for dtype, shape in facts["inputs"]]
    return TracedModel([reader(entry) for entry in facts["nodes"]], int(facts["result"]), inputs)
