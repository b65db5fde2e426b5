"""What a module computes for given inputs, operation by operation, to be written down.

The module runs once, in eval mode and without gradients; every operation that passes `tensor.apply` is noted. An array
is known by its identity: what an input or an earlier operation made is a `Ref`, anything else is a constant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewise.errors import ConfigurationError
from tilewise.nn import Module
from tilewise.onnx.graph import Array
from tilewise.plan.trace import Listener, listen
from tilewise.tensor import Tensor


@dataclass(frozen=True)
class Ref:
    """A value that depends on the inputs, by number."""

    number: int


@dataclass(frozen=True)
class Call:
    """One operation: its class, what it read, its parameters, and what it made."""

    operation: type
    inputs: tuple[Ref | Array, ...]
    params: dict[str, Any]
    made: Ref
    given: tuple[tuple[int, ...], ...]  # shapes of the inputs
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass
class Tracing:
    """Inputs are the first values; `outputs` by name, "" for the only one."""

    calls: list[Call] = field(default_factory=list)
    outputs: dict[str, tuple[Ref | Array, tuple[int, ...], np.dtype[Any]]] = field(default_factory=dict)


class _Tracer(Listener):
    """Keeps every array alive, so that no two have the same identity."""

    def __init__(self, inputs: list[Array]) -> None:
        super().__init__()
        self.tracing, self.alive = Tracing(), list(inputs)
        self.refs = {id(array): Ref(i) for i, array in enumerate(inputs)}

    def seen(self, value: Any) -> Any:
        return self.refs.get(id(value), value) if isinstance(value, np.ndarray) else value

    def note(self, step: Any, arrays: list[Any], params: dict[str, Any], result: Array) -> None:
        self.alive += [result, *arrays]
        inputs = tuple(self.seen(a) for a in arrays)
        known = {name: self.seen(value) for name, value in params.items()}
        if not any(isinstance(v, Ref) for v in (*inputs, *known.values())) and type(step).__name__ != "Expand":
            return  # made of constants alone: a constant; but spreading one may follow the batch
        if any(result is a for a in arrays):
            return  # handed on as it came
        made = self.refs[id(result)] = Ref(len(self.alive))
        shapes = tuple(a.shape for a in arrays)
        self.tracing.calls.append(Call(type(step), inputs, known, made, shapes, result.shape, result.dtype))


def trace(module: Module, inputs: list[Array]) -> Tracing:
    """The operations of `module(*inputs)`."""
    tensors = [Tensor(x) for x in inputs]
    tracer = _Tracer([t.data for t in tensors])
    result = listen(tracer, module, *tensors)
    results = result if isinstance(result, dict) else {"": result}
    for name, value in results.items():
        if not isinstance(value, Tensor):
            raise ConfigurationError(f"{type(module).__name__} gives a {type(value).__name__}, which ONNX cannot hold")
        tracer.tracing.outputs[name] = (tracer.seen(value.data), value.shape, value.dtype)
    return tracer.tracing
