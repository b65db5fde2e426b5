"""Intermediate representations: the traced operations (`Trace` of `Node`s) and the ops they are lowered to (`Op`).

A node is an operation of the framework as the module called it. An op is an operation of the native runtime with
its weights, its fused activation and its residual input; the float plan and the quantizer both work on ops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import ConfigurationError

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
Pair = tuple[int, int]


@dataclass(frozen=True)
class Value:
    """The result of an earlier node, by its number; the inputs have the first numbers."""

    number: int


@dataclass(frozen=True)
class Node:
    """One traced operation: its class, operands, parameters, the layer it ran in, and its result's shape and dtype."""

    operation: type
    inputs: tuple[Value | Array, ...]
    params: dict[str, Any]
    layer: str
    shape: Shape
    input_shapes: tuple[Shape, ...]
    dtype: np.dtype[Any]

    @property
    def name(self) -> str:
        """The name of the operation, or of the function that it computes."""
        return str(self.params.get("name") or self.operation.__name__)

    def reads(self) -> list[Value]:
        """Return the traced values among the operands and parameters, in order."""
        return [v for v in (*self.inputs, *self.params.values()) if isinstance(v, Value)]

    def evaluate(self, array_of: Callable[[Value], Array]) -> Array:
        """Compute the operation in NumPy; `array_of(value)` returns the array of a value that it reads."""

        def operand(value: Any) -> Any:
            return array_of(value) if isinstance(value, Value) else value

        params = {name: operand(value) for name, value in self.params.items()}
        return np.asarray(self.operation().forward(*map(operand, self.inputs), **params))


@dataclass
class Trace:
    """Nodes in execution order; with k inputs, node i makes value k + i. Results by name, "" for a single one."""

    inputs: list[Array]
    nodes: list[Node] = field(default_factory=list)
    results: dict[str, Value | Array] = field(default_factory=dict)
    outputs: dict[str, Array] = field(default_factory=dict)  # the arrays that the module returned

    @property
    def result(self) -> Value | Array:
        """Return the only result of the traced module; raise if it returns several."""
        if "" not in self.results:
            raise ConfigurationError("a plan returns one Tensor; this module returns several results")
        return self.results[""]

    def node(self, number: int) -> Node:
        return self.nodes[number - len(self.inputs)]

    def users(self) -> dict[int, int]:
        """Count the readers of each value, by value number; being a result of the trace counts as one."""
        # The result is read by the caller.
        counts = dict.fromkeys(range(len(self.inputs) + len(self.nodes)), 0)
        for value in [*(v for n in self.nodes for v in n.reads()), *self.results.values()]:
            if isinstance(value, Value):
                counts[value.number] += 1
        return counts


@dataclass
class Op:
    """One op of the native runtime. `shape` is the shape of its result, as the trace recorded it."""

    # The kinds of the float runtime are the keys of `graph.ops.NATIVE_OPS`. "python" calls the traced operation
    # outside the native call; "input" occurs where ops are a list (the quantizer's graph).
    kind: str
    inputs: tuple[int, ...]
    shape: Shape
    layer: str = ""
    activation: str = ""
    weight: Array | None = None
    bias: Array | None = None
    options: dict[str, Any] = field(default_factory=dict)
    node: Node | None = None  # the traced operation of a "python" op
    algorithm: str = ""  # of a convolution: the requested algorithm, later the one in use
    gain: Array | None = None  # per output channel: a folded norm's scale that `weight` does not contain yet

    def scaled_weight(self) -> Array:
        """Return the weight multiplied by the gain, computed on demand to hold the weights only once."""
        assert self.weight is not None
        return self.weight if self.gain is None else self.weight * self.gain.reshape(-1, *(1,) * (self.weight.ndim - 1))

    @property
    def name(self) -> str:
        return self.layer

    @property
    def kernel(self) -> Pair:
        """Return the window (height, width) of a convolution's filter or of a pool."""
        # The filter (O, C, kh, kw) is the only record of a convolution's window.
        if self.kind == "conv" and self.weight is not None:
            return (self.weight.shape[2], self.weight.shape[3])
        window: Pair = self.options.get("kernel", (1, 1))
        return window

    @property
    def stride(self) -> Pair:
        pair: Pair = self.options.get("stride", (1, 1))
        return pair

    @property
    def padding(self) -> tuple[int, int, int, int]:
        """Padding at the top, left, bottom and right."""
        sides: tuple[int, int, int, int] = self.options.get("padding", (0, 0, 0, 0))
        return sides

    @property
    def groups(self) -> int:
        return int(self.options.get("groups", 1))

    @property
    def dilation(self) -> Pair:
        pair: Pair = self.options.get("dilation", (1, 1))
        return pair


def unique_name(name: str, names: set[str], separator: str = ".") -> str:
    """Return `name`, with a number appended if it is in `names` already, and add the result to `names`."""
    # The first of equal names has no number, so that unique names are unchanged.
    candidate, count = name, 1
    while candidate in names:
        count += 1
        candidate = f"{name}{separator}{count}"
    names.add(candidate)
    return candidate


def four_sides(padding: tuple[int, ...]) -> tuple[int, ...]:
    """Expand padding of one, two (height, width) or four numbers to (top, left, bottom, right)."""
    # (rows, columns) pads opposite sides alike.
    return padding if len(padding) == 4 else (*padding, *padding)
