"""The ops of the native float runtime: how each is added to a native plan, and its name in profiles.

A new op is one entry of `NATIVE_OPS` here, a lowering rule (passes/lower_layers.py) or a pattern that creates it, and
its native implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilewise.backend.registry import current_backend
from tilewise.graph.ir import Op, Shape


@dataclass(frozen=True)
class EmitContext:
    """The native plan under construction: `weights(op)` returns a packed layer, `shape(i)` the shape of a value."""

    plan: Any
    weights: Callable[[Op], Any] = lambda _op: None
    shape: Callable[[int], Shape] = lambda _number: ()


@dataclass(frozen=True)
class OpSpec:
    """Adds an op to a native plan (`emit(context, op, operands)` returns its value), and the op's profile name."""

    emit: Callable[[EmitContext, Op, list[int]], int]
    profile_name: str = ""


def _tuned_algorithm(op: Op, x: Shape) -> str:
    """Return the fastest measured algorithm of a convolution on this machine, "" if none was measured.

    Only 3×3 filters with stride 1 have a choice.
    """
    chooser, (top, left, bottom, right) = current_backend().tile_chooser, op.padding
    plain = op.kernel == (3, 3) and op.stride == op.dilation == (1, 1) and (top, left) == (bottom, right)
    if chooser is None or not plain or len(x) != 4 or x[0] == 0:
        return ""
    tile = chooser("conv2d", (*x, op.shape[1], 3, 3, 1, 1, top, left, op.groups), "float32", "nchw")
    return str(getattr(tile, "algorithm", ""))


def _conv(context: EmitContext, op: Op, operands: list[int]) -> int:
    """Add a convolution to the native graph, with the tuned algorithm if there is one."""
    layer = context.weights(op)
    algorithm = op.algorithm or _tuned_algorithm(op, context.shape(op.inputs[0]))
    value = int(context.plan.conv(layer, *operands, algorithm=algorithm))
    layer.release()  # the plan has packed the weights
    return value


def _linear(context: EmitContext, op: Op, operands: list[int]) -> int:
    # Over tokens a linear layer is a 1×1 convolution.
    if len(op.shape) != 2:
        return _conv(context, op, operands)
    return int(context.plan.linear(context.weights(op), *operands))


def _int8_linear(context: EmitContext, op: Op, operands: list[int]) -> int:
    return int(context.plan.dynamic_linear(op.options["layer"], *operands, activation=op.activation))


def _pool(context: EmitContext, op: Op, operands: list[int]) -> int:
    return int(context.plan.pool(operands[0], mean=op.kind == "avg_pool", **op.options))


def _binary(context: EmitContext, op: Op, operands: list[int]) -> int:
    return int(context.plan.binary(op.kind, *operands, op.activation))


def _affine(context: EmitContext, op: Op, operands: list[int]) -> int:
    scale = [] if op.weight is None else op.weight.tolist()
    shift = [] if op.bias is None else op.bias.tolist()
    return int(context.plan.affine(operands[0], scale, shift, op.activation))


def _layer_norm(context: EmitContext, op: Op, operands: list[int]) -> int:
    assert op.weight is not None and op.bias is not None
    return int(context.plan.layer_norm(operands[0], op.weight.tolist(), op.bias.tolist(), op.options["eps"]))


def _group_norm(context: EmitContext, op: Op, operands: list[int]) -> int:
    assert op.weight is not None and op.bias is not None
    weight, bias = op.weight.tolist(), op.bias.tolist()
    return int(context.plan.group_norm(operands[0], op.options["groups"], weight, bias, op.options["eps"]))


def _gather_spatial(context: EmitContext, op: Op, operands: list[int]) -> int:
    return int(context.plan.gather_spatial(operands[0], op.options["index"], op.shape[0], *op.options["size"]))


def _rms_norm(context: EmitContext, op: Op, operands: list[int]) -> int:
    assert op.weight is not None
    return int(context.plan.rms_norm(operands[0], op.weight.tolist(), op.options["eps"]))


def _strided(context: EmitContext, op: Op, operands: list[int]) -> int:
    """Add an operation on strided views; the native method has the name of its kind."""
    return int(getattr(context.plan, op.kind)(operands, **op.options))


NATIVE_OPS: dict[str, OpSpec] = {
    # Layers with packed weights.
    "conv": OpSpec(_conv, "conv2d"),
    "linear": OpSpec(_linear, "matmul"),
    "int8_linear": OpSpec(_int8_linear, "int8_linear"),  # int8 weights, every row of floats quantized by its own scale
    # Pooling and elementwise ops on (N, C, H, W) or rows (N, C).
    "max_pool": OpSpec(_pool, "max_pool2d"),
    "avg_pool": OpSpec(_pool, "avg_pool2d"),
    "global_mean": OpSpec(lambda c, _op, x: int(c.plan.global_mean(x[0])), "mean"),
    "add": OpSpec(_binary),
    "sub": OpSpec(_binary),
    "mul": OpSpec(_binary),
    "affine": OpSpec(_affine),  # per-channel scale and shift, and an activation
    # Data movement; concat and slice are views of one buffer where the memory planner allows it.
    "concat": OpSpec(lambda c, _op, x: int(c.plan.concat(x)), "cat"),  # of channels
    "slice": OpSpec(lambda c, op, x: int(c.plan.slice(x[0], op.options["first"], op.options["count"])), "get_item"),
    "gather_channels": OpSpec(lambda c, op, x: int(c.plan.gather_channels(x[0], op.options["channels"])), "get_item"),
    "gather_spatial": OpSpec(_gather_spatial),  # pixels in another order or number
    "transpose": OpSpec(lambda c, _op, x: int(c.plan.transpose(x[0]))),  # exchange channels and positions
    "upsample": OpSpec(lambda c, op, x: int(c.plan.upsample(x[0], *op.options["by"]))),
    "depth_to_space": OpSpec(lambda c, op, x: int(c.plan.depth_to_space(x[0], *op.options["by"]))),
    "flatten": OpSpec(lambda c, _op, x: int(c.plan.flatten(x[0])), "reshape"),
    "identity": OpSpec(lambda _c, _op, x: x[0], "reshape"),
    # Normalization and attention.
    "layer_norm": OpSpec(_layer_norm, "layer_norm"),
    "channel_norm": OpSpec(_layer_norm, "layer_norm"),  # of the pixels of an image (N, C, H, W)
    "group_norm": OpSpec(_group_norm),
    "attention": OpSpec(lambda c, op, x: int(c.plan.attention(x, **op.options)), "attention"),
    "rms_norm": OpSpec(_rms_norm),
    # Strided ops: floats of any rank, operands read through views (passes/strided.py).
    "map": OpSpec(_strided),  # an elementwise function, options["kind"]
    "reduce": OpSpec(_strided),
    "softmax": OpSpec(_strided),
    "cumulative_sum": OpSpec(_strided),
    "matmul": OpSpec(_strided),
    "assemble": OpSpec(_strided, "cat"),  # concatenation, padding
    "grouped_attention": OpSpec(_strided, "attention"),
}
