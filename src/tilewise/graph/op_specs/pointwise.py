"""Operators without weights: arithmetic per element, data movement, attention, and operators on strided views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise.graph.ir import Array, Op
from tilewise.graph.op_specs.functions import activated, write_activation
from tilewise.graph.op_specs.spec import EmitContext, OnnxForm, OpSpec, Quantization

Arguments = Callable[[Op], tuple[Any, ...]]
Reference = Callable[..., Array]
Write = Callable[[OnnxForm, Op, list[str]], str]

# --- arithmetic ---


def _arithmetic(function: Callable[[Array, Array], Array]) -> OpSpec:
    """Return the `OpSpec` of an elementwise binary operator such as addition, computed by `function`."""

    def emit(context: EmitContext, op: Op, operands: list[int]) -> int:
        return int(context.plan.binary(op.kind, *operands, op.activation))

    def reference(op: Op, a: Array, b: Array) -> Array:
        return activated(function(a, b), op.activation)

    def write(form: OnnxForm, op: Op, inputs: list[str]) -> str:
        return write_activation(form, form.node(op.kind.capitalize(), *inputs), op.activation)

    return OpSpec(emit, "", reference, write, Quantization.OWN)


def _emit_affine(context: EmitContext, op: Op, operands: list[int]) -> int:
    """Add x * scale + shift per channel to the native plan and return its value number."""
    scale = [] if op.weight is None else op.weight.tolist()
    shift = [] if op.bias is None else op.bias.tolist()
    return int(context.plan.affine(operands[0], scale, shift, op.activation))


def _affine(op: Op, x: Array) -> Array:
    """Compute activation(x · weight + bias) per channel in NumPy; weight or bias may be missing."""
    by_channel = (1, -1) + (1,) * (x.ndim - 2)
    if op.weight is not None:
        x = x * op.weight.reshape(by_channel)
    if op.bias is not None:
        x = x + op.bias.reshape(by_channel)
    return activated(x, op.activation)


def _write_affine(form: OnnxForm, op: Op, inputs: list[str]) -> str:
    """Write the per-channel multiplication and addition as Mul, Add and the activation."""
    x = inputs[0]
    for node, name, constant in (("Mul", "weight", op.weight), ("Add", "bias", op.bias)):
        if constant is not None:
            by_channel = constant.reshape(1, -1, *(1,) * (len(op.shape) - 2))
            x = form.node(node, x, form.graph.weight(by_channel, f"{op.name}.{name}"))
    return write_activation(form, x, op.activation)


# --- movement ---


def _movement(arguments: Arguments, reference: Reference, onnx: Write, profile_name: str = "") -> OpSpec:
    """Return the `OpSpec` of an operator that only moves values.

    `arguments` gives the arguments of its native method, `reference` computes it in NumPy, `onnx` writes it.
    """

    def emit(context: EmitContext, op: Op, operands: list[int]) -> int:
        return int(getattr(context.plan, op.kind)(operands[0], *arguments(op), context.padding))

    return OpSpec(emit, profile_name, reference, onnx, Quantization.INPUT)


def _slice_bounds(op: Op) -> tuple[int, int]:
    """Return (first channel, number of channels) of a channel slice; the number defaults to the result's."""
    return op.options["first"], op.options.get("count", op.shape[1])


def _slice(op: Op, x: Array) -> Array:
    first, count = _slice_bounds(op)
    return x[:, first : first + count]


def _write_slice(form: OnnxForm, op: Op, inputs: list[str]) -> str:
    first, count = _slice_bounds(op)
    return form.node("Slice", inputs[0], *(form.graph.constant([n]) for n in (first, first + count, 1)))


def _repeats(op: Op) -> tuple[int, int]:
    return op.options["by"][0], op.options["by"][1]


def _upsample(op: Op, x: Array) -> Array:
    return x.repeat(op.options["by"][0], 2).repeat(op.options["by"][1], 3)


def _write_upsample(form: OnnxForm, op: Op, inputs: list[str]) -> str:
    """Write nearest-neighbour upsampling to an ONNX file, as a Gather node for height and one for width."""
    x = inputs[0]
    for axis, (by, size) in enumerate(zip(op.options["by"], op.shape[2:], strict=True), 2):
        x = form.node("Gather", x, form.graph.constant(np.repeat(np.arange(size // by), by)), axis=axis)
    return x


def _depth_to_space(op: Op, x: Array) -> Array:
    """Move channels into pixels: (N, C·bh·bw, H, W) becomes (N, C, H·bh, W·bw)."""
    (by_h, by_w), (n, c, h, w) = op.options["by"], x.shape
    blocks = x.reshape(n, by_h, by_w, c // (by_h * by_w), h, w).transpose(0, 3, 4, 1, 5, 2)
    return np.ascontiguousarray(blocks).reshape(n, -1, h * by_h, w * by_w)


def _write_depth_to_space(form: OnnxForm, op: Op, inputs: list[str]) -> str:
    """Write depth-to-space as Reshape, Transpose, Reshape, for blocks that need not be square."""
    (by_h, by_w), (c, h, w) = op.options["by"], op.shape[1:]
    blocks = form.node("Reshape", inputs[0], form.graph.constant([0, by_h, by_w, c, h // by_h, w // by_w]))
    transposed = form.node("Transpose", blocks, perm=[0, 3, 4, 1, 5, 2])
    return form.node("Reshape", transposed, form.graph.constant([0, c, h, w]))


def _emit_identity(context: EmitContext, op: Op, operands: list[int]) -> int:
    """Return the operand's value number; an integer plan first converts between image and row storage."""
    # Integer rows and images have different storage; floats have one.
    is_row = len(op.shape) == 2
    return int(context.plan.pixel_as_row(operands[0], is_row, context.padding)) if context.is_integer else operands[0]


def _emit_strided(context: EmitContext, op: Op, operands: list[int]) -> int:
    """Add an operation on strided views to the native graph; its kind is the name of the native method."""
    return int(getattr(context.plan, op.kind)(operands, **op.options))


POINTWISE = {
    "add": _arithmetic(np.add),
    "sub": _arithmetic(np.subtract),
    "mul": _arithmetic(np.multiply),
    # Per-channel scale and shift, and an activation.
    "affine": OpSpec(_emit_affine, "", _affine, _write_affine, Quantization.OWN),
    # Data movement; concat and slice are views of one buffer where the memory planner allows it.
    "concat": OpSpec(  # of channels
        lambda c, _op, x: int(c.plan.concat(x, c.padding)),
        "cat",
        lambda _op, *inputs: np.concatenate(inputs, 1),
        lambda form, _op, x: form.node("Concat", *x, axis=1),
        Quantization.SHARED,
    ),
    "slice": _movement(_slice_bounds, _slice, _write_slice, "get_item"),
    "gather_channels": _movement(
        lambda op: (list(op.options["channels"]),),
        lambda op, x: x[:, list(op.options["channels"])],
        lambda form, op, x: form.node("Gather", x[0], form.graph.constant(list(op.options["channels"])), axis=1),
        "get_item",
    ),
    "upsample": _movement(_repeats, _upsample, _write_upsample),
    "depth_to_space": _movement(_repeats, _depth_to_space, _write_depth_to_space),
    "flatten": OpSpec(
        lambda c, _op, x: int(c.plan.flatten(x[0])),
        "reshape",
        lambda _op, x: x.reshape(len(x), int(np.prod(x.shape[1:]))),
        lambda form, _op, x: form.node("Flatten", x[0], axis=1),
        Quantization.INPUT,
    ),
    "identity": OpSpec(
        _emit_identity,
        "reshape",
        lambda op, x: x.reshape(len(x), *op.shape[1:]),
        lambda form, op, x: form.node("Reshape", x[0], form.graph.constant([0, *op.shape[1:]])),
        Quantization.INPUT,
    ),
    # Pixels in another order or number.
    "gather_spatial": OpSpec(
        lambda c, op, x: int(c.plan.gather_spatial(x[0], op.options["index"], op.shape[0], *op.options["size"]))
    ),
    # Weighted sums of rows or columns: bilinear and cubic interpolation.
    "resample": OpSpec(lambda c, op, x: int(c.plan.resample(x[0], **op.options))),
    "transpose": OpSpec(lambda c, _op, x: int(c.plan.transpose(x[0]))),  # exchange channels and positions
    "attention": OpSpec(lambda c, op, x: int(c.plan.attention(x, **op.options))),
    # Strided ops: floats of any rank, operands read through views (passes/strided.py).
    "map": OpSpec(_emit_strided),  # an elementwise function, options["kind"]
    "reduce": OpSpec(_emit_strided),
    "softmax": OpSpec(_emit_strided),
    "cumulative_sum": OpSpec(_emit_strided),
    "matmul": OpSpec(_emit_strided),
    "assemble": OpSpec(_emit_strided, "cat"),  # concatenation, padding
    "grouped_attention": OpSpec(_emit_strided, "attention"),
}
