"""Epilogue fusion: activations and residual additions become the last stage of the op that makes their input."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tilewise.graph.ir import Node, Op, Value
from tilewise.graph.op_specs.functions import ACTIVATIONS
from tilewise.graph.passes.fold_batchnorm import lower_with_constant

if TYPE_CHECKING:
    from tilewise.graph.passes.lower import Lowering

LoweringRule = Callable[["Lowering", int, Node], Op | bool | None]

# Ops that can apply an activation to their result.
ACTIVATED_OPS = ("conv", "linear", "int8_linear", "add", "mul", "affine")


def _activation_of(low: Lowering, node: Node) -> str | None:
    """Return the name of the activation that a node computes; None if layers cannot fuse it."""
    name, params = node.operation.__name__, node.params
    if name == "Clip":
        return {(0, 6): "relu6", (0, None): "relu"}.get((params["low"], params["high"]))
    if name == "HardSigmoid":
        usual = math.isclose(params.get("slope", 1 / 6), 1 / 6, rel_tol=1e-6) and params.get("offset", 0.5) == 0.5
        return "hard_sigmoid" if usual else None
    if name == "LeakyRelu":
        # INT8 applies activations through a lookup table, whose range bounds the slope.
        slope = float(params["slope"])
        return f"leaky_relu {slope!r}" if low.is_float or 0.001 <= slope < 1 else None
    if name == "GeluTanh":
        return "gelu_tanh" if low.is_float else None
    return next(activation for activation, a in ACTIVATIONS.items() if a.operation == name)


def lower_activation(low: Lowering, number: int, node: Node) -> Op | bool | None:
    """Lower an activation: fuse it into the op that computes its input (True), or return an affine op."""
    name = _activation_of(low, node)
    return None if name is None else _activate(low, number, node, name)


def _activate(low: Lowering, number: int, node: Node, name: str) -> Op | bool | None:
    """Lower the activation `name`: fuse it into the op that computes the node's input (True), or return an op.

    None if there is no native form.
    """
    if _activate_behind_view(low, number, node, name):
        return True
    x = low.any_layout(node.inputs[0])
    if x is None:
        return None
    if low.sole_consumer(x, *ACTIVATED_OPS) is not None:
        return low.fuse_into(number, x, activation=name)
    # A pointwise function of moved pixels commutes with the movement.
    convs, _ = low.convs_before_movement(x) if low.is_float else ([], 1)
    for conv in convs:
        conv.activation = name
    if convs:
        low.add_alias(number, x)
        return True
    return Op("affine", (x,), node.shape, node.layer, name)


def _activate_behind_view(low: Lowering, number: int, node: Node, name: str) -> bool:
    """Fuse an activation into an op although its result is permuted and reshaped in between; return whether it was."""
    value = node.inputs[0]
    if not isinstance(value, Value) or not low.is_float or (view := low.views.get(low.resolve(value))) is None:
        return False
    source, reader = low.resolve(view.source), value.number
    op = low.ops.get(source)
    if op is None or op.kind not in ACTIVATED_OPS or op.activation or low.reader_count(source) != 1:
        return False
    if math.prod(view.shape) != math.prod(low.shapes[source]) or any(a.along < 0 for g in view.groups for a in g):
        return False
    # Nothing else reads one of the views between.
    while reader >= len(low.trace.inputs) and low.resolve(reader) != source:
        if low.reader_count(reader) != 1:
            return False
        reader = low.trace.node(reader).reads()[0].number
    op.activation = name
    low.views[number] = view
    return True


def lower_add(low: Lowering, number: int, node: Node) -> Op | bool | None:
    """Lower a sum: fold a constant (True), make the other value the residual of a layer (True), or return a binary op.

    None if there is no native form.
    """
    a, b = node.inputs
    if not (isinstance(a, Value) and isinstance(b, Value)):
        return lower_with_constant(low, number, node, product=False)
    operands = low.common_layout(a, b) if low.shapes[a.number] == low.shapes[b.number] else None
    if operands is None:
        return None
    p, q = operands
    layers = ("conv", "linear", "int8_linear") if len(node.shape) == 3 or p in low.channels_last else ("conv",)
    for result, residual in ((q, p), (p, q)):
        layer = low.sole_consumer(result, *layers) if result != residual else None
        if layer is not None and len(layer.inputs) == 1:
            return low.fuse_into(number, result, inputs=(*layer.inputs, residual))
    return Op("add", (p, q), node.shape, node.layer)


def lower_sub(low: Lowering, _number: int, node: Node) -> Op | None:
    """Return the op for the difference of two values of the same shape; None if it is not that."""
    a, b = node.inputs
    if not (isinstance(a, Value) and isinstance(b, Value)):
        return None
    if low.shapes[a.number] != low.shapes[b.number]:
        return None
    operands = low.common_layout(a, b)
    return None if operands is None else Op("sub", tuple(operands), node.shape, node.layer)


def lower_mul(low: Lowering, number: int, node: Node) -> Op | bool | None:
    """Lower a product: x · sigmoid(x) becomes SiLU, a constant is folded, a gate (N, C, 1, 1) multiplies every pixel.

    True if it was fused into an existing op, None if it is unsupported.
    """
    a, b = node.inputs
    if not (isinstance(a, Value) and isinstance(b, Value)):
        return lower_with_constant(low, number, node, product=True)
    operands = low.common_layout(a, b)
    if operands is None:
        return None
    p, q = operands
    for gate, x in ((p, q), (q, p)):
        op = low.ops.get(gate)
        is_sigmoid = op is not None and op.kind == "affine" and op.weight is None and op.activation == "sigmoid"
        if op is not None and is_sigmoid and op.inputs == (x,) and low.reader_count(gate) == 1:
            del low.ops[gate]
            low.users[x] -= 1
            return _activate(low, number, replace(node, inputs=(Value(x),), params={}), "silu")
    shapes = (low.shapes[a.number], low.shapes[b.number])
    gated = all(len(s) == 4 and s[:2] == node.shape[:2] for s in shapes) and (1, 1) in (shapes[0][2:], shapes[1][2:])
    supported = shapes[0] == shapes[1] or (gated and p not in low.channels_last)
    return Op("mul", (p, q), node.shape, node.layer) if supported else None
