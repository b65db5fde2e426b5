"""What a module computes for one input, as a list of operations.

The module runs once, in eval mode and without gradients, and every operation that passes `tensor.apply` is noted with
the arrays it read and made. An array is known by its identity: one that an earlier operation made is a value, any other
is a constant. So any module can be traced, however its `forward` is written, as long as its numbers pass through
tensors.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise import _events
from tilewise.errors import ConfigurationError
from tilewise.nn.module import Module
from tilewise.tensor import Tensor, no_grad

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Value:
    """The result of an earlier node, by its number; number 0 is the input."""

    number: int


@dataclass(frozen=True)
class Node:
    """One operation: its class, what it read, its parameters, the layer it ran in, the shape it gave."""

    operation: type
    inputs: tuple[Value | Array, ...]
    params: dict[str, Any]
    layer: str
    shape: tuple[int, ...]


@dataclass
class Trace:
    """Nodes in the order they ran; node i made value i + 1."""

    input_shape: tuple[int, ...]
    nodes: list[Node] = field(default_factory=list)
    result: Value | Array = Value(0)
    output: Array = field(default_factory=lambda: np.zeros(0, np.float32))  # what the module gave

    def users(self) -> dict[int, int]:
        """How many times each value is read; the result counts once more."""
        counts = dict.fromkeys(range(len(self.nodes) + 1), 0)
        read = [v for n in self.nodes for v in (*n.inputs, *n.params.values()) if isinstance(v, Value)]
        for value in [*read, self.result]:
            if isinstance(value, Value):
                counts[value.number] += 1
        return counts


class Listener:
    """Hears of every operation of the thread that made it, in `note`."""

    def __init__(self) -> None:
        self.owner = threading.get_ident()
        self.records: list[Any] = _Forgetful()
        self.models: list[Any] = []

    def __call__(self, step: Any, arrays: list[Any], params: dict[str, Any], result: Any) -> None:
        if threading.get_ident() == self.owner:
            self.note(step, arrays, params, np.asarray(result))

    def note(self, step: Any, arrays: list[Any], params: dict[str, Any], result: Array) -> None:
        raise NotImplementedError


class _Tracer(Listener):
    """An array is forgotten when it ends, since another may then have its identity: a network that lets its values go
    when nobody reads them any more needs no more memory here than elsewhere."""

    def __init__(self, example: Array) -> None:
        super().__init__()
        self.trace = Trace(example.shape)
        self.values: dict[int, tuple[Value, weakref.ref[Array]]] = {}
        self._remember(example, Value(0))

    def _remember(self, array: Array, value: Value) -> None:
        number, values = id(array), self.values

        def forget(gone: weakref.ref[Array]) -> None:
            if number in values and values[number][1] is gone:
                del values[number]

        values[number] = value, weakref.ref(array, forget)

    def seen(self, array: Any) -> Any:
        found = self.values.get(id(array))
        return found[0] if found is not None and found[1]() is array else array

    def note(self, step: Any, arrays: list[Any], params: dict[str, Any], result: Array) -> None:
        inputs = tuple(self.seen(a) for a in arrays)
        known = {name: self.seen(value) for name, value in params.items()}
        if not any(isinstance(v, Value) for v in (*inputs, *known.values())):
            return  # made of constants alone: a constant
        self.trace.nodes.append(Node(type(step), inputs, known, step.recorded_layer, result.shape))
        self._remember(result, Value(len(self.trace.nodes)))


class _Forgetful(list[Any]):
    def append(self, item: Any) -> None:
        pass


@contextmanager
def _as_in_use(module: Module) -> Iterator[None]:
    """Eval mode, no gradients; afterwards every layer is in the mode it was in."""
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        with no_grad():
            yield
    finally:
        for layer, training in modes:
            layer.training = training


def listen(listener: Listener, module: Module, *inputs: Tensor) -> Any:
    """What `module(*inputs)` gives, as it is in use, while every operation is heard of."""
    _events.recorders.attach(listener)
    _events.tracers.append(listener)
    try:
        with _as_in_use(module):
            return module(*inputs)
    finally:
        _events.tracers.remove(listener)
        _events.recorders.detach(listener)


def run(module: Module, x: Array) -> Any:
    """The module's own result for an array, as it is in use."""
    with _as_in_use(module):
        return module(Tensor(x))


def trace(module: Module, example: Any) -> Trace:
    """The operations of `module(example)`."""
    x = Tensor(np.ascontiguousarray(example))
    tracer = _Tracer(x.data)
    result = listen(tracer, module, x)
    if not isinstance(result, Tensor):
        raise ConfigurationError(f"{type(module).__name__} gives a {type(result).__name__}; a plan gives one Tensor")
    tracer.trace.result, tracer.trace.output = tracer.seen(result.data), result.data
    return tracer.trace
