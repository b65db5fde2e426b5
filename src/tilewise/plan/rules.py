"""How each operation becomes a step of a plan, or part of the step before it.

A rule gives a new step; True where an existing step took the node along; None where the native plan has nothing for it.
`x * sigmoid(x)` is SiLU, reshape-permute-reshape over channels a channel shuffle, a transposed convolution whose
windows do not overlap a 1×1 convolution and a spreading of its channels over pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise.plan import tokens
from tilewise.plan.steps import Array, Shape, Step
from tilewise.plan.trace import Node, Value

if TYPE_CHECKING:
    from tilewise.plan.lower import Lowering

Rule = Callable[["Lowering", int, Node], Step | bool | None]

ACTIVATIONS = {"Relu": "relu", "Gelu": "gelu", "Sigmoid": "sigmoid", "Silu": "silu", "HardSwish": "hard_swish"}
TAKES_ACTIVATION = ("conv", "linear", "add", "mul", "affine")


def four(padding: tuple[int, ...]) -> tuple[int, ...]:
    """Top, left, bottom, right."""
    return padding if len(padding) == 4 else (*padding, *padding)


def _conv(low: Lowering, _number: int, node: Node) -> Step | None:
    x = low.image(node.inputs[0])
    filters, params = _filters(node), node.params
    if x is None or filters is None:
        return None
    options = {"stride": params["stride"], "padding": four(params["padding"]), "groups": params["groups"]}
    options["dilation"] = params.get("dilation", (1, 1))
    residual = params.get("residual")
    inputs: tuple[int, ...] = (x,)
    if residual is not None:
        other = low.image(residual)
        if other is None:
            return None
        inputs = (x, other)
    return Step("conv", inputs, node.shape, node.layer, params.get("activation") or "", *filters, options)


def _linear(low: Lowering, _number: int, node: Node) -> Step | None:
    x = low.image(node.inputs[0])
    filters, rows = _filters(node), len(node.shape) == 2 and node.params.get("residual") is None
    if filters is not None and len(node.shape) == 3:
        return tokens.linear(low, node, filters)
    if x is None or not rows or filters is None:
        return None
    return Step("linear", (x,), node.shape, node.layer, node.params.get("activation") or "", *filters)


def _filters(node: Node) -> tuple[Array, Array | None] | None:
    """A node's weights and bias, where both are constants of float32."""
    weight, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    if isinstance(weight, Value) or isinstance(bias, Value) or not _is_float(weight):
        return None
    return (weight, bias) if bias is None or _is_float(bias) else None


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
        bias = shift if conv.bias is None else conv.bias * scale + shift
        gain = scale if conv.gain is None else conv.gain * scale
        return low.taken_along(number, x, gain=gain, bias=bias, layer=conv.layer)
    return Step("affine", (x,), node.shape, node.layer, weight=scale, bias=shift)


def _activation(name: str) -> Rule:
    def rule(low: Lowering, number: int, node: Node) -> Step | bool | None:
        x = _either(low, node.inputs[0])
        if x is None:
            return None
        if low.alone(x, *TAKES_ACTIVATION) is not None:
            return low.taken_along(number, x, activation=name)
        return Step("affine", (x,), node.shape, node.layer, name)

    return rule


def _either(low: Lowering, value: Value | Array) -> int | None:
    """An image, or tokens that a step makes: only those are known to be float32."""
    x = low.tokens(value)
    return x if x is not None and x in low.steps and low.steps[x].kind != "python" else low.image(value)


def _clip(low: Lowering, number: int, node: Node) -> Step | bool | None:
    low_high = (node.params["low"], node.params["high"])
    name = {(0, 6): "relu6", (0, None): "relu"}.get(low_high)
    return None if name is None else _activation(name)(low, number, node)


def _hard_sigmoid(low: Lowering, number: int, node: Node) -> Step | bool | None:
    usual = math.isclose(node.params.get("slope", 1 / 6), 1 / 6, rel_tol=1e-6) and node.params.get("offset", 0.5) == 0.5
    return _activation("hard_sigmoid")(low, number, node) if usual else None


def _add(low: Lowering, number: int, node: Node) -> Step | bool | None:
    a, b = node.inputs
    if isinstance(a, Value) and isinstance(b, Value):
        if low.shapes[a.number] != low.shapes[b.number]:
            return None
        if len(node.shape) == 3 and (_either(low, a) is None and _either(low, b) is None):
            return None
        p, q = (low.tokens(v) if len(node.shape) == 3 else low.image(v) for v in (a, b))
        if p is None or q is None:
            return None
        for conv, other in ((q, p), (p, q)):
            found = low.alone(conv, "conv", *(["linear"] if len(node.shape) == 3 else [])) if conv != other else None
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
            return _activation("silu")(low, number, replace(node, inputs=(Value(x),), params={}))
    shapes = (low.shapes[a.number], low.shapes[b.number])
    whole = shapes[0] == shapes[1]
    by_channel = all(len(s) == 4 and s[:2] == node.shape[:2] for s in shapes) and (1, 1) in (
        shapes[0][2:],
        shapes[1][2:],
    )
    return Step("mul", (p, q), node.shape, node.layer) if whole or by_channel else None


def _is_gate(low: Lowering, step: Step, gate: int, x: int) -> bool:
    """sigmoid(x), read by this product only."""
    plain = step.kind == "affine" and step.weight is None and step.activation == "sigmoid"
    return plain and step.inputs == (x,) and low.readers(gate) == 1


def _with_constant(low: Lowering, number: int, node: Node, product: bool) -> Step | bool | None:
    a, b = node.inputs
    value, constant = (a, b) if isinstance(a, Value) else (b, a)
    x = low.image(value)
    if (
        x is None
        or isinstance(constant, Value)
        or not isinstance(value, Value)
        or low.shapes[value.number] != node.shape
    ):
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


def _pool(kind: str) -> Rule:
    def rule(low: Lowering, _number: int, node: Node) -> Step | None:
        x = low.image(node.inputs[0])
        known = {"kernel", "stride", "padding", "count_padding"}
        if x is None or not set(node.params) <= known:
            return None
        padding = four(node.params["padding"])
        options = {"kernel": node.params["kernel"], "stride": node.params["stride"], "padding": padding}
        options["count_padding"] = node.params.get("count_padding", True)
        return Step(kind, (x,), node.shape, node.layer, options=options)

    return rule


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
    if (seen := tokens.viewed(low, number, node)) is not None:
        return seen
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


def _permute(low: Lowering, number: int, node: Node) -> Step | bool | None:
    value = node.inputs[0]
    source = low.find(value) if isinstance(value, Value) else -1
    if (seen := tokens.viewed(low, number, node)) is not None:
        return seen
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


def _get_item(low: Lowering, number: int, node: Node) -> Step | bool | None:
    if (seen := tokens.viewed(low, number, node)) is not None:
        return seen
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


def _conv_transpose(low: Lowering, number: int, node: Node) -> Step | None:
    """Windows side by side: every output pixel comes of one input pixel and one tap."""
    x, filters, params = low.image(node.inputs[0]), _filters(node), node.params
    if x is None or filters is None:
        return None
    weight, bias = filters
    c, o, kh, kw = weight.shape
    apart = params["stride"] == (kh, kw) and params.get("groups", 1) == 1
    if not apart or any(params.get("padding", (0,))) or any(params.get("output_padding", (0,))):
        return None
    taps = np.ascontiguousarray(weight.transpose(2, 3, 1, 0)).reshape(kh * kw * o, c, 1, 1)
    repeated = None if bias is None else np.tile(bias, kh * kw)
    n, _, h, w = low.shapes[x]
    options = {"stride": (1, 1), "padding": (0, 0, 0, 0), "groups": 1, "dilation": (1, 1)}
    product = low.new_value((n, kh * kw * o, h, w))
    low.steps[product] = Step("conv", (x,), low.shapes[product], node.layer, "", taps, repeated, options)
    return Step("spread", (product,), node.shape, node.layer, options={"by": (kh, kw)})


def _resample(low: Lowering, _number: int, node: Node) -> Step | None:
    """Entries repeated along rows or columns."""
    x, axis = low.image(node.inputs[0]), node.params["axis"]
    taps, value = node.params["taps"], node.inputs[0]
    if x is None or not isinstance(value, Value) or len(node.shape) != 4 or axis % 4 not in (2, 3):
        return None
    size, positions, weights = low.shapes[value.number][axis], np.asarray(taps.positions), np.asarray(taps.weights)
    by = node.shape[axis] // size
    repeated = np.repeat(np.arange(size), by)
    if (
        positions.size != repeated.size
        or not np.array_equal(positions.reshape(-1), repeated)
        or not (weights == 1).all()
    ):
        return None
    factors = (by, 1) if axis % 4 == 2 else (1, by)
    return Step("upsample", (x,), node.shape, node.layer, options={"by": factors})


RULES: dict[str, Rule] = {
    "Conv2d": _conv,
    "Linear": _linear,
    "FixedNorm": _norm,
    "LayerNorm": tokens.layer_norm,
    "Attention": tokens.attention,
    "PackedAttention": tokens.packed_attention,
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
    "Resample": _resample,
    "ConvTranspose2d": _conv_transpose,
    "GeluTanh": _activation("gelu_tanh"),
    **{operation: _activation(name) for operation, name in ACTIVATIONS.items()},
}
