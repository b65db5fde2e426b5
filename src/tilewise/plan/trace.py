"""What a module computes for given inputs, as a list of operations: to be planned, quantized or written to a file.

The module runs once, in eval mode and without gradients, and every operation that passes `tensor.apply` is noted with
the arrays it read and made. An array is known by its identity: one that an earlier operation made is a value, any other
is a constant. So any module can be traced, however its `forward` is written, as long as its numbers pass through
tensors.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterator
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
    """The result of an earlier node, by its number; the inputs have the first numbers."""

    number: int


@dataclass(frozen=True)
class Node:
    """One operation: its class, what it read, its parameters, the layer it ran in, what it gave."""

    operation: type
    inputs: tuple[Value | Array, ...]
    params: dict[str, Any]
    layer: str
    shape: tuple[int, ...]
    given: tuple[tuple[int, ...], ...]  # shapes of the inputs
    dtype: np.dtype[Any]

    def reads(self) -> list[Value]:
        return [v for v in (*self.inputs, *self.params.values()) if isinstance(v, Value)]


@dataclass
class Trace:
    """Nodes in the order they ran; with k inputs, node i made value k + i. Results by name, "" for the only one."""

    inputs: list[Array]
    nodes: list[Node] = field(default_factory=list)
    results: dict[str, Value | Array] = field(default_factory=dict)
    outputs: dict[str, Array] = field(default_factory=dict)  # what the module gave

    @property
    def result(self) -> Value | Array:
        if "" not in self.results:
            raise ConfigurationError("a plan gives one Tensor; this module gives several results")
        return self.results[""]

    def node(self, number: int) -> Node:
        return self.nodes[number - len(self.inputs)]

    def users(self) -> dict[int, int]:
        """How many times each value is read; a result counts once more."""
        counts = dict.fromkeys(range(len(self.inputs) + len(self.nodes)), 0)
        for value in [*(v for n in self.nodes for v in n.reads()), *self.results.values()]:
            if isinstance(value, Value):
                counts[value.number] += 1
        return counts


class _Tracer:
    """Listens to one thread. An array is forgotten when it ends, since another may then have its identity: a network
    that lets its values go when nobody reads them any more needs no more memory here than elsewhere."""

    def __init__(self, inputs: list[Array], kept: Collection[str]) -> None:
        self.owner, self.kept = threading.get_ident(), kept
        self.records: list[Any] = _Forgetful()
        self.models: list[Any] = []
        self.trace = Trace(inputs)
        self.values: dict[int, tuple[Value, weakref.ref[Array]]] = {}
        for number, array in enumerate(inputs):
            self._note(array, Value(number))

    def _note(self, array: Array, value: Value) -> None:
        number, values = id(array), self.values

        def forget(gone: weakref.ref[Array]) -> None:
            if number in values and values[number][1] is gone:
                del values[number]

        values[number] = value, weakref.ref(array, forget)

    def seen(self, array: Any) -> Any:
        found = self.values.get(id(array))
        return found[0] if found is not None and found[1]() is array else array

    def __call__(self, step: Any, arrays: list[Any], params: dict[str, Any], result: Any) -> None:
        if threading.get_ident() != self.owner:
            return
        result = np.asarray(result)
        shapes = tuple(a.shape for a in arrays)
        known = {name: self.seen(value) for name, value in params.items()}
        seen = tuple(self.seen(a) for a in arrays)
        node = Node(type(step), seen, known, step.recorded_layer, result.shape, shapes, result.dtype)
        if not node.reads() and type(step).__name__ not in self.kept:
            return  # made of constants alone: a constant
        if any(result is a for a in arrays):
            return  # handed on as it came
        self.trace.nodes.append(node)
        self._note(result, Value(len(self.trace.inputs) + len(self.trace.nodes) - 1))


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


def run(module: Module, *inputs: Array) -> Any:
    """The module's own result for arrays, as it is in use."""
    with _as_in_use(module):
        return module(*map(Tensor, inputs))


def trace(module: Module, *examples: Any, kept: Collection[str] = ()) -> Trace:
    """The operations of `module(*examples)`; those named in `kept` also where they read constants alone."""
    inputs = [Tensor(np.ascontiguousarray(x)) for x in examples]
    tracer = _Tracer([x.data for x in inputs], kept)
    _events.recorders.attach(tracer)
    _events.tracers.append(tracer)
    try:
        with _as_in_use(module):
            given = module(*inputs)
    finally:
        _events.tracers.remove(tracer)
        _events.recorders.detach(tracer)
    for name, result in (given if isinstance(given, dict) else {"": given}).items():
        if not isinstance(result, Tensor):
            raise ConfigurationError(f"{type(module).__name__} gives a {type(result).__name__}, and not Tensors alone")
        tracer.trace.results[name], tracer.trace.outputs[name] = tracer.seen(result.data), result.data
    return tracer.trace
