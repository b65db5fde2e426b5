"""From a trace to the steps of a plan: what the native plan can run, with as much as possible taken along.

A batch norm after a convolution goes into its weights, an addition after it becomes its residual, an activation its last
act. `x * sigmoid(x)` is SiLU, reshape-permute-reshape over channels is a channel shuffle. A node of another kind, or with
sizes that the native steps do not have, stays an operation that is called from Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.plan.trace import Node, Trace, Value

Array = npt.NDArray[Any]
Shape = tuple[int, ...]

ACTIVATIONS = {"Relu": "relu", "Gelu": "gelu", "Sigmoid": "sigmoid", "Silu": "silu", "HardSwish": "hard_swish"}
TAKES_ACTIVATION = ("conv", "linear", "add", "mul", "affine")


@dataclass
class Step:
    """One step: its kind, the values it reads, and the numbers it needs. `shape` is the result's, as the trace saw it."""

    kind: str  # conv, linear, max_pool, avg_pool, global_mean, add, mul, affine, concat, slice, take, upsample, flatten, same, python
    inputs: tuple[int, ...]
    shape: Shape
    layer: str = ""
    activation: str = ""
    weight: Array | None = None
    bias: Array | None = None
    options: dict[str, Any] = field(default_factory=dict)
    node: Node | None = None  # of a python step


class Lowering:
    """The steps by the value they make, in the order they run."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.users = trace.users()
        self.shapes: dict[int, Shape] = {0: trace.input_shape}
        self.steps: dict[int, Step] = {}
        self.same_as: dict[int, int] = {}  # values that another step makes
        self.shuffles: dict[int, tuple[int, int, bool]] = {}  # channels seen as (groups, each), swapped or not
        for number, node in enumerate(trace.nodes, 1):
            self.shapes[number] = node.shape
            made = self._lowered(number, node)
            if made is None:
                self._refuse_shuffles(node)
                made = self._python(node)
            if isinstance(made, Step):
                self.steps[number] = made
        self.steps = {n: s for n, s in self.steps.items() if self._is_read(n)}

    def _is_read(self, number: int) -> bool:
        return self.users[number] > 0

    def find(self, value: Value | int) -> int:
        """The step that makes a value."""
        number = value.number if isinstance(value, Value) else value
        while number in self.same_as:
            number = self.same_as[number]
        return number

    def _values(self, node: Node) -> list[int]:
        return [self.find(v) for v in (*node.inputs, *node.params.values()) if isinstance(v, Value)]

    def _python(self, node: Node) -> Step:
        return Step("python", tuple(self._values(node)), node.shape, node.layer, node=node)

    def _lowered(self, number: int, node: Node) -> Step | bool | None:
        """A new step; True where an existing one took the node along; None where neither can be."""
        handler: Callable[[Lowering, int, Node], Step | bool | None] | None = _HANDLERS.get(node.operation.__name__)
        return None if handler is None else handler(self, number, node)

    def _refuse_shuffles(self, node: Node) -> None:
        """A half-read shuffle that an unknown operation reads: its reshapes must run as they are."""
        for value in self._values(node):
            if self.shuffles.pop(value, None) is not None:
                reshape = self.trace.nodes[value - 1]
                self._refuse_shuffles(reshape)
                self.steps[value] = self._python(reshape)

    def image(self, value: Value | Array) -> int | None:
        """The step of a value that the native plan can hold: (N, C, H, W) or (N, C), none of them empty."""
        if not isinstance(value, Value):
            return None
        shape = self.shapes[value.number]
        number = self.find(value)
        usable = len(shape) in (2, 4) and min(shape[1:]) > 0 and number not in self.shuffles
        return number if usable else None

    def taken_along(self, number: int, into: int, **changes: Any) -> bool:
        """The step `into`, which nobody else reads, makes this value too, with these changes; it runs here."""
        step = self.steps.pop(into)
        for name, change in changes.items():
            setattr(step, name, change)
        step.shape = self.shapes[number]
        self.steps[number] = step
        self.same_as[into] = number
        return True

    def alone(self, number: int, *kinds: str) -> Step | None:
        """The step that makes this value, if it is one of these kinds and its only reader is the node at hand."""
        step = self.steps.get(number)
        single = step is not None and step.kind in kinds and self._readers(number) == 1
        return step if single and step is not None and not step.activation else None

    def _readers(self, number: int) -> int:
        """How often the trace reads the value or one that is the same."""
        earlier = [n for n in self.same_as if self.find(n) == number]
        return self.users[number] + sum(self.users[n] - 1 for n in earlier if self.users[n] > 0)


def four(padding: tuple[int, ...]) -> tuple[int, ...]:
    """Top, left, bottom, right."""
    return padding if len(padding) == 4 else (*padding, *padding)


# --- one handler an operation ---


def _conv(low: Lowering, _number: int, node: Node) -> Step | None:
    x = low.image(node.inputs[0])
    weight, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    if x is None or not _is_float(weight) or not (bias is None or _is_float(bias)):
        return None
    params = node.params
    options = {"stride": params["stride"], "padding": four(params["padding"]), "groups": params["groups"]}
    options["dilation"] = params.get("dilation", (1, 1))
    residual = params.get("residual")
    inputs: tuple[int, ...] = (x,)
    if residual is not None:
        other = low.image(residual)
        if other is None:
            return None
        inputs = (x, other)
    return Step("conv", inputs, node.shape, node.layer, params.get("activation") or "", weight, bias, options)


def _linear(low: Lowering, _number: int, node: Node) -> Step | None:
    x = low.image(node.inputs[0])
    weight, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    rows = len(node.shape) == 2 and node.params.get("residual") is None
    if x is None or not rows or not _is_float(weight) or not (bias is None or _is_float(bias)):
        return None
    return Step("linear", (x,), node.shape, node.layer, node.params.get("activation") or "", weight, bias)


def _is_float(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype == np.float32 and array.size > 0


def _norm(low: Lowering, number: int, node: Node) -> Step | bool | None:
    x, weight, bias = low.image(node.inputs[0]), node.inputs[1], node.inputs[2]
    mean, var = node.params["mean"], node.params["var"]
    if x is None or not all(_is_float(a) for a in (weight, bias, mean, var)):
        return None
    scale = np.asarray(weight / np.sqrt(var + np.float32(node.params["eps"])), np.float32)
    return _scaled(low, number, node, x, scale, np.asarray(bias - mean * scale, np.float32))


def _scaled(low: Lowering, number: int, node: Node, x: int, scale: Array, shift: Array) -> Step | bool:
    """x * scale + shift by channel, taken along by a convolution's weights where one makes x."""
    conv = low.alone(x, "conv")
    if conv is not None and len(conv.inputs) == 1:
        assert conv.weight is not None
        bias = shift if conv.bias is None else conv.bias * scale + shift
        return low.taken_along(number, x, weight=conv.weight * scale[:, None, None, None], bias=bias, layer=conv.layer)
    return Step("affine", (x,), node.shape, node.layer, weight=scale, bias=shift)


def _activation(name: str) -> Callable[[Lowering, int, Node], Step | bool | None]:
    def handler(low: Lowering, number: int, node: Node) -> Step | bool | None:
        x = low.image(node.inputs[0])
        if x is None:
            return None
        if low.alone(x, *TAKES_ACTIVATION) is not None:
            return low.taken_along(number, x, activation=name)
        return Step("affine", (x,), node.shape, node.layer, name)

    return handler


def _clip(low: Lowering, number: int, node: Node) -> Step | bool | None:
    low_high = (node.params["low"], node.params["high"])
    name = {(0, 6): "relu6", (0, None): "relu"}.get(low_high)
    return None if name is None else _activation(name)(low, number, node)


def _hard_sigmoid(low: Lowering, number: int, node: Node) -> Step | bool | None:
    usual = math.isclose(node.params.get("alpha", 1 / 6), 1 / 6, rel_tol=1e-6) and node.params.get("beta", 0.5) == 0.5
    return _activation("hard_sigmoid")(low, number, node) if usual else None


def _add(low: Lowering, number: int, node: Node) -> Step | bool | None:
    a, b = node.inputs
    if isinstance(a, Value) and isinstance(b, Value):
        p, q = low.image(a), low.image(b)
        if p is None or q is None or low.shapes[a.number] != low.shapes[b.number]:
            return None
        for conv, other in ((q, p), (p, q)):
            found = low.alone(conv, "conv") if conv != other else None
            if found is not None and len(found.inputs) == 1:
                return low.taken_along(number, conv, inputs=(*found.inputs, other))
        return Step("add", (p, q), node.shape, node.layer)
    return _with_constant(low, number, node, product=False)


def _mul(low: Lowering, number: int, node: Node) -> Step | bool | None:
    a, b = node.inputs
    if not (isinstance(a, Value) and isinstance(b, Value)):
        return _with_constant(low, number, node, product=True)
    p, q = low.image(a), low.image(b)
    if p is None or q is None:
        return None
    for gate, x in ((p, q), (q, p)):
        step = low.steps.get(gate)
        if step is not None and _is_gate(low, step, gate, x):
            del low.steps[gate]
            low.users[x] -= 1
            return _activation("silu")(low, number, Node(node.operation, (Value(x),), {}, node.layer, node.shape))
    shapes = (low.shapes[a.number], low.shapes[b.number])
    whole = shapes[0] == shapes[1]
    by_channel = all(len(s) == 4 and s[:2] == node.shape[:2] for s in shapes) and (1, 1) in (shapes[0][2:], shapes[1][2:])
    return Step("mul", (p, q), node.shape, node.layer) if whole or by_channel else None


def _is_gate(low: Lowering, step: Step, gate: int, x: int) -> bool:
    """sigmoid(x), read by this product only."""
    plain = step.kind == "affine" and step.weight is None and step.activation == "sigmoid"
    return plain and step.inputs == (x,) and low._readers(gate) == 1


def _with_constant(low: Lowering, number: int, node: Node, product: bool) -> Step | bool | None:
    a, b = node.inputs
    value, constant = (a, b) if isinstance(a, Value) else (b, a)
    x = low.image(value)
    if x is None or isinstance(constant, Value) or not isinstance(value, Value) or low.shapes[value.number] != node.shape:
        return None
    channels = _by_channel(np.asarray(constant), node.shape)
    if channels is None:
        return None
    one, zero = np.ones_like(channels), np.zeros_like(channels)
    return _scaled(low, number, node, x, channels if product else one, zero if product else channels)


def _by_channel(constant: Array, shape: Shape) -> Array | None:
    """A constant that is one number a channel of (N, C, ...), as (C,)."""
    padded = (1,) * (len(shape) - constant.ndim) + constant.shape
    if constant.ndim > len(shape) or padded[0] != 1 or any(size != 1 for size in padded[2:]):
        return None
    return np.array(np.broadcast_to(constant.reshape(-1), (shape[1],)), np.float32)


def _pool(kind: str) -> Callable[[Lowering, int, Node], Step | None]:
    def handler(low: Lowering, _number: int, node: Node) -> Step | None:
        x = low.image(node.inputs[0])
        known = {"kernel", "stride", "padding", "count_padding"}
        if x is None or not set(node.params) <= known:
            return None
        padding = four(node.params["padding"])
        options = {"kernel": node.params["kernel"], "stride": node.params["stride"], "padding": padding}
        options["count_padding"] = node.params.get("count_padding", True)
        return Step(kind, (x,), node.shape, node.layer, options=options)

    return handler


def _global_mean(low: Lowering, _number: int, node: Node) -> Step | None:
    x = low.image(node.inputs[0])
    return None if x is None else Step("global_mean", (x,), node.shape, node.layer)


def _mean(low: Lowering, number: int, node: Node) -> Step | None:
    axis, value = node.params.get("axis"), node.inputs[0]
    if not isinstance(value, Value) or len(low.shapes[value.number]) != 4 or not isinstance(axis, tuple):
        return None
    return _global_mean(low, number, node) if sorted(a % 4 for a in axis) == [2, 3] else None


def _reshape(low: Lowering, number: int, node: Node) -> Step | bool | None:
    value = node.inputs[0]
    assert isinstance(value, Value)
    before, after, source = low.shapes[value.number], node.shape, low.find(value)
    if source in low.shuffles:
        x, groups, swapped = low.shuffles[source]
        if not swapped or after != low.shapes[x]:
            return None
        each = after[1] // groups
        order = np.arange(after[1]).reshape(groups, each).T.reshape(-1).tolist()
        return Step("take", (x,), after, node.layer, options={"channels": order})
    x2 = low.image(value)
    if x2 is None:
        return None
    if len(before) == 4 and len(after) == 5 and after[0] == before[0] and after[3:] == before[2:]:
        low.shuffles[number] = (x2, after[1], False)
        return True
    if after == (before[0], math.prod(before[1:])):
        return Step("flatten", (x2,), after, node.layer)
    if before[:2] == after[:2] and math.prod(before[2:]) == math.prod(after[2:]) == 1:
        return Step("same", (x2,), after, node.layer)
    return None


def _permute(low: Lowering, number: int, node: Node) -> bool | None:
    value = node.inputs[0]
    source = low.find(value) if isinstance(value, Value) else -1
    if source not in low.shuffles or tuple(node.params["axes"]) != (0, 2, 1, 3, 4):
        return None
    x, groups, swapped = low.shuffles[source]
    if swapped:
        return None
    low.shuffles[number] = (x, groups, True)
    return True


def _cat(low: Lowering, _number: int, node: Node) -> Step | None:
    parts = [low.image(value) for value in node.inputs]
    if any(p is None for p in parts) or node.params["axis"] % len(node.shape) != 1:
        return None
    return Step("concat", tuple(p for p in parts if p is not None), node.shape, node.layer)


def _get_item(low: Lowering, _number: int, node: Node) -> Step | None:
    x, index = low.image(node.inputs[0]), node.params["index"]
    if x is None or not isinstance(index, tuple) or len(index) < 2 or len(node.shape) not in (2, 4):
        return None
    if any(not isinstance(i, slice) for i in index):
        return None
    value = node.inputs[0]
    assert isinstance(value, Value)
    whole = [i.indices(size) for i, size in zip(index, low.shapes[value.number], strict=False)]
    others = [r for at, r in enumerate(whole) if at != 1]
    sizes = [s for at, s in enumerate(low.shapes[value.number][: len(index)]) if at != 1]
    if whole[1][2] != 1 or node.shape[1] < 1 or any(r != (0, size, 1) for r, size in zip(others, sizes, strict=True)):
        return None
    return Step("slice", (x,), node.shape, node.layer, options={"first": whole[1][0]})


_HANDLERS: dict[str, Callable[[Lowering, int, Node], Step | bool | None]] = {
    "Conv2d": _conv,
    "Linear": _linear,
    "FixedNorm": _norm,
    "Add": _add,
    "Mul": _mul,
    "Clip": _clip,
    "HardSigmoid": _hard_sigmoid,
    "MaxPool2d": _pool("max_pool"),
    "AvgPool2d": _pool("avg_pool"),
    "GlobalAvgPool": _global_mean,
    "Mean": _mean,
    "Reshape": _reshape,
    "Permute": _permute,
    "Cat": _cat,
    "GetItem": _get_item,
    **{operation: _activation(name) for operation, name in ACTIVATIONS.items()},
}
