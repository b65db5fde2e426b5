"""Tracing: run a module once and record its operations, to be planned, quantized or written to a file.

The module runs in eval mode and without gradients. Every operation that passes `tensor.apply` is recorded with the
arrays it read and returned. Arrays are identified by object identity: the result of a recorded operation is a value,
every other array is a constant. Any `forward` can be traced as long as its numbers pass through tensors.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tilewise import _events
from tilewise.errors import ConfigurationError
from tilewise.graph.ir import Array, Node, Trace, Value
from tilewise.nn.module import Module
from tilewise.nn.self_planning import layer_by_layer
from tilewise.tensor import Tensor, no_grad


class _Tracer:
    """Records the operations of one thread.

    Arrays are held by weak references and forgotten when they are freed, because a later array may get the same
    identity. A traced network therefore needs no more memory than a plain run.
    """

    def __init__(self, inputs: list[Array], always_record: Collection[str]) -> None:
        """Start a trace whose first values are these inputs."""
        self.owner, self.always_record = threading.get_ident(), always_record
        self.records: list[Any] = _DiscardingList()
        self.models: list[Any] = []
        self.trace = Trace(inputs)
        self.values: dict[int, tuple[Value, weakref.ref[Array]]] = {}  # by id(array)
        for number, array in enumerate(inputs):
            self._register(array, Value(number))

    def _register(self, array: Array, value: Value) -> None:
        """Remember which value an array holds, until the array is garbage-collected."""
        key, values = id(array), self.values

        def forget(reference: weakref.ref[Array]) -> None:
            if key in values and values[key][1] is reference:
                del values[key]

        values[key] = value, weakref.ref(array, forget)

    def operand(self, array: Any) -> Any:
        """Return the traced value that `array` holds; an array that is not traced is returned as a constant."""
        entry = self.values.get(id(array))
        return entry[0] if entry is not None and entry[1]() is array else array

    def is_traced(self, array: Any) -> bool:
        """Tell whether an array is an input of this trace or the result of one of its nodes."""
        return threading.get_ident() == self.owner and isinstance(self.operand(array), Value)

    def __call__(self, step: Any, arrays: list[Any], params: dict[str, Any], result: Any) -> None:
        """Record one operation (`step`) with its operands, parameters and result."""
        # Other threads may run other models at the same time.
        if threading.get_ident() != self.owner:
            return
        result = np.asarray(result)
        node = Node(
            operation=type(step),
            inputs=tuple(self.operand(a) for a in arrays),
            params={name: self.operand(value) for name, value in params.items()},
            layer=step.recorded_layer,
            shape=result.shape,
            input_shapes=tuple(a.shape for a in arrays),
            dtype=result.dtype,
        )
        # An operation on constants makes a constant.
        if not node.reads() and type(step).__name__ not in self.always_record:
            return
        # An operation that returns its input changes nothing.
        if any(result is a for a in arrays):
            return
        self.trace.nodes.append(node)
        self._register(result, Value(len(self.trace.inputs) + len(self.trace.nodes) - 1))


class _DiscardingList(list[Any]):
    """A list that stays empty: `append` drops the item."""

    def append(self, item: Any) -> None:
        pass


@contextmanager
def _inference_mode(module: Module) -> Iterator[None]:
    """Switch to eval mode without gradients; restore every layer's mode afterwards."""
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        with no_grad(), layer_by_layer():
            yield
    finally:
        for layer, training in modes:
            layer.training = training


def run(module: Module, *inputs: Array) -> Any:
    """Run a module on arrays in inference mode and return its result."""
    with _inference_mode(module):
        return module(*map(Tensor, inputs))


def trace(module: Module, *examples: Any, always_record: Collection[str] = ()) -> Trace:
    """Record the operations of `module(*examples)`.

    Operations on constants are evaluated instead of recorded, except those whose class is named in `always_record`.
    """
    inputs = [Tensor(np.ascontiguousarray(x)) for x in examples]
    tracer = _Tracer([x.data for x in inputs], always_record)
    # The recorder makes layers report their names; the tracer receives the operations.
    _events.recorders.attach(tracer)
    _events.tracers.append(tracer)
    try:
        with _inference_mode(module):
            returned = module(*inputs)
    finally:
        _events.tracers.remove(tracer)
        _events.recorders.detach(tracer)
    for name, result in (returned if isinstance(returned, dict) else {"": returned}).items():
        if not isinstance(result, Tensor):
            raise ConfigurationError(
                f"{type(module).__name__} returns a {type(result).__name__}; a trace needs Tensors or a dict of Tensors"
            )
        tracer.trace.results[name], tracer.trace.outputs[name] = tracer.operand(result.data), result.data
    return tracer.trace
