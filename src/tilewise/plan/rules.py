"""How each operation becomes a step of a plan, or part of the step before it.

A rule gives a new step; True where an existing step took the node along; None where the native plan has nothing for it.
`x * sigmoid(x)` is SiLU, a transposed convolution whose windows do not overlap a 1×1 convolution and a spreading of its
channels over pixels. Reshapes, permutations and indices are views, which become steps where they are read (layouts.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise.plan import tokens
from tilewise.plan.rewriting import by_channel
from tilewise.plan.steps import Array, Step
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
    filters = _filters(node)
    return None if filters is None else _product(low, node, *filters)


def _matmul(low: Lowering, _number: int, node: Node) -> Step | None:
    """A product with a constant matrix."""
    weight = node.inputs[1]
    if isinstance(weight, Value) or not low.is_float or not _is_float(weight) or weight.ndim != 2:
        return None
    return _product(low, node, weight.T, None)


def _product(low: Lowering, node: Node, weight: Array, bias: Array | None) -> Step | None:
    if len(node.shape) > 2:
        return tokens.linear(low, node, (weight, bias))
    x = low.image(node.inputs[0])
    if x is None or len(node.shape) < 2 or node.params.get("residual") is not None:
        return None
    return Step("linear", (x,), node.shape, node.layer, node.params.get("activation") or "", weight, bias)


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
    """x * scale + shift by channel, taken along by the weights of the layer that makes x."""
    conv = low.alone(x, "conv", *(["linear"] if low.is_float else []))
    if conv is not None and len(conv.inputs) == 1:
        bias = shift if conv.bias is None else conv.bias * scale + shift
        gain = scale if conv.gain is None else conv.gain * scale
        return low.taken_along(number, x, gain=gain, bias=bias, layer=conv.layer)
    return Step("affine", (x,), node.shape, node.layer, weight=scale, bias=shift)


def _activation(name: str) -> Rule:
    def rule(low: Lowering, number: int, node: Node) -> Step | bool | None:
        x = low.either(node.inputs[0])
        if x is None:
            return None
        if low.alone(x, *TAKES_ACTIVATION) is not None:
            return low.taken_along(number, x, activation=name)
        return Step("affine", (x,), node.shape, node.layer, name)

    return rule


def _clip(low: Lowering, number: int, node: Node) -> Step | bool | None:
    low_high = (node.params["low"], node.params["high"])
    name = {(0, 6): "relu6", (0, None): "relu"}.get(low_high)
    return None if name is None else _activation(name)(low, number, node)


def _hard_sigmoid(low: Lowering, number: int, node: Node) -> Step | bool | None:
    usual = math.isclose(node.params.get("slope", 1 / 6), 1 / 6, rel_tol=1e-6) and node.params.get("offset", 0.5) == 0.5
    return _activation("hard_sigmoid")(low, number, node) if usual else None


def _gelu_tanh(low: Lowering, number: int, node: Node) -> Step | bool | None:
    return _activation("gelu_tanh")(low, number, node) if low.is_float else None


def _leaky_relu(low: Lowering, number: int, node: Node) -> Step | bool | None:
    slope = float(node.params["slope"])
    return _activation(f"leaky_relu {slope!r}")(low, number, node) if low.is_float else None


def _add(low: Lowering, number: int, node: Node) -> Step | bool | None:
    a, b = node.inputs
    if not (isinstance(a, Value) and isinstance(b, Value)):
        return _with_constant(low, number, node, product=False)
    pair = low.alike(a, b) if low.shapes[a.number] == low.shapes[b.number] else None
    if pair is None:
        return None
    p, q = pair
    layers = ("conv", "linear") if len(node.shape) == 3 or p in low.last else ("conv",)
    for made, other in ((q, p), (p, q)):
        found = low.alone(made, *layers) if made != other else None
        if found is not None and len(found.inputs) == 1:
            return low.taken_along(number, made, inputs=(*found.inputs, other))
    return Step("add", (p, q), node.shape, node.layer)


def _sub(low: Lowering, _number: int, node: Node) -> Step | None:
    a, b = node.inputs
    if not (low.is_float and isinstance(a, Value) and isinstance(b, Value)):
        return None
    if low.shapes[a.number] != low.shapes[b.number]:
        return None
    pair = low.alike(a, b)
    return None if pair is None else Step("sub", tuple(pair), node.shape, node.layer)


def _mul(low: Lowering, number: int, node: Node) -> Step | bool | None:
    a, b = node.inputs
    if not (isinstance(a, Value) and isinstance(b, Value)):
        return _with_constant(low, number, node, product=True)
    pair = low.alike(a, b)
    if pair is None:
        return None
    p, q = pair
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
    fits = whole or (by_channel and p not in low.last)
    return Step("mul", (p, q), node.shape, node.layer) if fits else None


def _is_gate(low: Lowering, step: Step, gate: int, x: int) -> bool:
    """sigmoid(x), read by this product only."""
    plain = step.kind == "affine" and step.weight is None and step.activation == "sigmoid"
    return plain and step.inputs == (x,) and low.readers(gate) == 1


def _with_constant(low: Lowering, number: int, node: Node, product: bool) -> Step | bool | None:
    a, b = node.inputs
    value, constant = (a, b) if isinstance(a, Value) else (b, a)
    if isinstance(constant, Value) or not isinstance(value, Value) or low.shapes[value.number] != node.shape:
        return None
    x = low.either(value)
    if x is None:
        return None
    last = x in low.last or len(node.shape) == 3
    channels = by_channel(np.asarray(constant), node.shape, len(node.shape) - 1 if last else 1)
    if channels is None:
        return _with_every(low, node, x, np.asarray(constant), product) if low.is_float else None
    one, zero = np.ones_like(channels), np.zeros_like(channels)
    return _scaled(low, number, node, x, channels if product else one, zero if product else channels)


def _with_every(low: Lowering, node: Node, x: int, constant: Array, product: bool) -> Step:
    """A number for every entry, as the places of tokens have them."""
    other = low.constant(np.broadcast_to(constant, node.shape).astype(np.float32))
    low.settle(other, x in low.last)
    return Step("mul" if product else "add", (x, other), node.shape, node.layer)


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


def _group_norm(low: Lowering, _number: int, node: Node) -> Step | None:
    x, weight, bias = low.image(node.inputs[0]), *node.inputs[1:]
    if x is None or isinstance(weight, Value) or isinstance(bias, Value):
        return None
    return Step("group_norm", (x,), node.shape, node.layer, "", weight, bias, dict(node.params))


def _global_mean(low: Lowering, _number: int, node: Node) -> Step | None:
    x = low.image(node.inputs[0])
    return None if x is None else Step("global_mean", (x,), node.shape, node.layer)


def _mean(low: Lowering, number: int, node: Node) -> Step | None:
    """Of all pixels."""
    axis, value = node.params.get("axis"), node.inputs[0]
    if not isinstance(value, Value) or axis is None:
        return None
    rank = len(low.shapes[value.number])
    axes = sorted(a % rank for a in (axis if isinstance(axis, tuple) else (axis,)))
    if rank == 4 and axes == [2, 3]:
        return _global_mean(low, number, node)
    x = low.tokens(value) if axes == list(range(1, rank - 1)) and len(node.shape) in (2, 3) else None
    return None if x is None else Step("global_mean", (x,), node.shape, node.layer)


def _reshape(low: Lowering, number: int, node: Node) -> Step | bool | None:
    value = node.inputs[0]
    assert isinstance(value, Value)
    before, after = low.shapes[value.number], node.shape
    if len(before) == 4 and math.prod(before[2:]) > 1 and after == (before[0], math.prod(before[1:])):
        x = low.image(value)
        return None if x is None else Step("flatten", (x,), after, node.layer)
    return tokens.viewed(low, number, node)


def _cat(low: Lowering, _number: int, node: Node) -> Step | None:
    axis, rank = node.params["axis"] % len(node.shape), len(node.shape)
    parts = low.alike(*node.inputs) if node.inputs else None
    if parts is None or axis != (rank - 1 if rank == 3 or parts[0] in low.last else 1):
        return None
    return Step("concat", tuple(parts), node.shape, node.layer)


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
    "GroupNorm": _group_norm,
    "Attention": tokens.attention,
    "PackedAttention": tokens.packed_attention,
    "MatMul": _matmul,
    "Add": _add,
    "Sub": _sub,
    "Mul": _mul,
    "LeakyRelu": _leaky_relu,
    "Clip": _clip,
    "HardSigmoid": _hard_sigmoid,
    "MaxPool2d": _pool("max_pool"),
    "PaddedMaxPool": _pool("max_pool"),
    "AvgPool2d": _pool("avg_pool"),
    "GlobalAvgPool": _global_mean,
    "Mean": _mean,
    "Reshape": _reshape,
    "Permute": tokens.viewed,
    "Cat": _cat,
    "GetItem": tokens.viewed,
    "Resample": _resample,
    "ConvTranspose2d": _conv_transpose,
    "GeluTanh": _gelu_tanh,
    **{operation: _activation(name) for operation, name in ACTIVATIONS.items()},
}
