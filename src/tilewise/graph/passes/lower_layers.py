"""Lowering rules for convolutions, products, pools and resizing, and the table of all rules (`RULES`).

A rule returns a new op, True if the node was fused into an existing op, or None if the native runtime does not support
the node. Reshapes, permutations and indices are views, which become ops where they are read (layout.py).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise.graph.ir import Array, Node, Op, Value, four_sides
from tilewise.graph.op_specs.functions import ACTIVATIONS
from tilewise.graph.passes.fold_batchnorm import lower_batch_norm
from tilewise.graph.passes.fuse_epilogue import (
    LoweringRule,
    lower_activation,
    lower_add,
    lower_mul,
    lower_sub,
)
from tilewise.graph.passes.lower_tokens import (
    lower_attention,
    lower_dynamic_linear,
    lower_packed_attention,
    lower_recurrent,
    lower_view_node,
)
from tilewise.graph.passes.views import indexed, whole

if TYPE_CHECKING:
    from tilewise.graph.passes.lower import Lowering


_LANES = 16  # output channels that a convolution computes at a time with the widest vectors


def _conv(low: Lowering, _number: int, node: Node) -> Op | None:
    """Lower a convolution with constant weights and an optional residual."""
    x = low.image(node.inputs[0])
    weights, params = _constant_weights(node), node.params
    if x is None or weights is None:
        return None
    # Filter (O, C / groups, kh, kw) over an image (N, C, H, W).
    options = {"stride": params["stride"], "padding": four_sides(params["padding"]), "groups": params["groups"]}
    options["dilation"] = params.get("dilation", (1, 1))
    residual = params.get("residual")
    inputs: tuple[int, ...] = (x,)
    if residual is not None:
        addend = low.image(residual)
        if addend is None:
            return None
        inputs = (x, addend)
    weight, bias = weights
    activation = params.get("activation") or ""
    return Op("conv", inputs, node.shape, node.layer, activation, weight=weight, bias=bias, options=options)


def _linear(low: Lowering, _number: int, node: Node) -> Op | None:
    weights = _constant_weights(node)
    return None if weights is None else _product(low, node, *weights)


def _matmul(low: Lowering, _number: int, node: Node) -> Op | None:
    """Lower a product with a constant matrix."""
    weight = node.inputs[1]
    if isinstance(weight, Value) or not low.is_float or not _is_float(weight) or weight.ndim != 2:
        return None
    return _product(low, node, weight.T, None)


def _product(low: Lowering, node: Node, weight: Array, bias: Array | None) -> Op | None:
    """Lower x · weight + bias with constant weights, for rows, a flattened image, or tokens with a residual."""
    # Tokens (B, T, C) keep their layout; rows (N, C) are a plain product.
    has_tokens, residual = len(node.shape) > 2, node.params.get("residual")
    x = low.tokens(node.inputs[0]) if has_tokens else low.image(node.inputs[0])
    addend = low.tokens(residual) if residual is not None and has_tokens else None
    if x is None or len(node.shape) < 2 or (residual is not None and addend is None):
        return None
    inputs = (x,) if addend is None else (x, addend)
    activation = node.params.get("activation") or ""
    return Op("linear", inputs, node.shape, node.layer, activation, weight=weight, bias=bias)


def _constant_weights(node: Node) -> tuple[Array, Array | None] | None:
    """Return a node's weight and bias if both are float32 constants."""
    weight, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    if isinstance(weight, Value) or isinstance(bias, Value) or not _is_float(weight):
        return None
    return (weight, bias) if bias is None or _is_float(bias) else None


def _is_float(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype == np.float32 and array.size > 0


def _pool(kind: str) -> LoweringRule:
    """Return the lowering rule of a max or average pool; it rejects dilation and ceiling mode."""

    def rule(low: Lowering, _number: int, node: Node) -> Op | None:
        """Lower one pool; None if its settings are not supported."""
        x = low.image(node.inputs[0])
        if x is None or not set(node.params) <= {"kernel", "stride", "padding", "count_padding"}:
            return None
        padding = four_sides(node.params["padding"])
        options = {"kernel": node.params["kernel"], "stride": node.params["stride"], "padding": padding}
        options["count_padding"] = node.params.get("count_padding", True)
        return Op(kind, (x,), node.shape, node.layer, options=options)

    return rule


def _norm(kind: str, of_images: bool = False) -> LoweringRule:
    """Return the lowering rule of a norm with constant weights over the last axis, or over images."""

    def rule(low: Lowering, _number: int, node: Node) -> Op | None:
        """Lower one norm; None if its weights are not constant or its input has another layout."""
        x = low.image(node.inputs[0]) if of_images else low.last_axis_channels(node.inputs[0])
        if x is None or not (of_images or low.is_float):
            return None
        tensors = [t for t in node.inputs[1:] if isinstance(t, np.ndarray) and t.dtype == np.float32 and t.ndim == 1]
        if len(tensors) != len(node.inputs) - 1:
            return None
        weight, bias = tensors if len(tensors) == 2 else (tensors[0], None)
        return Op(kind, (x,), node.shape, node.layer, weight=weight, bias=bias, options=dict(node.params))

    return rule


def _global_mean(low: Lowering, _number: int, node: Node) -> Op | None:
    x = low.image(node.inputs[0])
    return None if x is None else Op("global_mean", (x,), node.shape, node.layer)


def _mean(low: Lowering, number: int, node: Node) -> Op | None:
    """Lower a mean over all pixels or all tokens; None for other axes."""
    axis, value = node.params.get("axis"), node.inputs[0]
    if not isinstance(value, Value) or axis is None:
        return None
    # Over (2, 3) of an image (N, C, H, W), or over all axes between batch and channels of tokens.
    rank = len(low.shapes[value.number])
    axes = sorted(a % rank for a in (axis if isinstance(axis, tuple) else (axis,)))
    if rank == 4 and axes == [2, 3] and low.is_image(value):
        return _global_mean(low, number, node)
    x = low.tokens(value) if axes == list(range(1, rank - 1)) and len(node.shape) in (2, 3) else None
    return None if x is None else Op("global_mean", (x,), node.shape, node.layer)


def _reshape(low: Lowering, number: int, node: Node) -> Op | bool | None:
    """Lower a reshape that flattens an image, which needs a native op in channels-last; others become views."""
    value = node.inputs[0]
    assert isinstance(value, Value)
    before, after = low.shapes[value.number], node.shape
    flattens = len(before) == 4 and math.prod(before[2:]) > 1 and after == (before[0], math.prod(before[1:]))
    if flattens and low.is_image(value):
        x = low.image(value)
        return None if x is None else Op("flatten", (x,), after, node.layer)
    return lower_view_node(low, number, node)


def _cat(low: Lowering, _number: int, node: Node) -> Op | None:
    """Lower a concatenation along the channel axis; None for other axes."""
    # The channel axis is 1 in (N, C, H, W) and (N, C), and the last one in tokens and channels-last images.
    axis, rank = node.params["axis"] % len(node.shape), len(node.shape)
    operands = low.common_layout(*node.inputs) if node.inputs else None
    if operands is None or axis != (rank - 1 if rank == 3 or operands[0] in low.channels_last else 1):
        return None
    return Op("concat", tuple(operands), node.shape, node.layer)


def _conv_transpose(low: Lowering, number: int, node: Node) -> Op | bool | None:
    """Lower a transposed convolution to convolutions and depth-to-space (sub-pixel convolution, Shi et al. 2016).

    Output pixel s · q + r - padding reads the taps r, r + s, r + 2 s ... of the inputs q, q - 1, q - 2 ...: each of
    the s phases r is a convolution with every s-th tap.
    """
    x, weights, params = low.image(node.inputs[0]), _constant_weights(node), node.params
    if x is None or weights is None or params.get("groups", 1) != 1:
        return None
    (weight, bias), (n, _, h, w), (sh, sw) = weights, low.shapes[x], params["stride"]
    c, o, kh, kw = weight.shape
    # Along an axis of one input, every tap is a phase: the stride moves nothing.
    sh, sw = (max(s, k) if size == 1 else s for s, k, size in ((sh, kh, h), (sw, kw, w)))
    taps = (-(-kh // sh), -(-kw // sw))  # of one phase
    full = (sh * (h + taps[0] - 1), sw * (w + taps[1] - 1))
    start = params.get("padding", (0, 0))
    if any(p + size > most for p, size, most in zip(start, node.shape[2:], full, strict=True)):
        return None
    # (C, O, taps, phases, taps, phases), the taps reversed, becomes filters (phases, phases, O, C, taps, taps).
    padded = np.pad(weight, ((0, 0), (0, 0), (0, taps[0] * sh - kh), (0, taps[1] * sw - kw)))
    phases = padded.reshape(c, o, taps[0], sh, taps[1], sw)[:, :, ::-1, :, ::-1].transpose(3, 5, 1, 0, 2, 4)
    reach = (taps[0] - 1, taps[1] - 1)
    if full != node.shape[2:]:
        if (op := _cropped_phases(low, node, x, phases, bias, start)) is not None:
            return op
        if not low.is_float:
            return None  # integer images are not cropped
    filters = np.ascontiguousarray(phases).reshape(sh * sw * o, c, *taps)
    tiled_bias = None if bias is None else np.tile(bias, sh * sw)
    options = {"stride": (1, 1), "padding": (*reach, *reach), "groups": 1, "dilation": (1, 1)}
    product = low.new_value((n, sh * sw * o, full[0] // sh, full[1] // sw))
    shape = low.shapes[product]
    low.ops[product] = Op("conv", (x,), shape, node.layer, weight=filters, bias=tiled_bias, options=options)
    if full == node.shape[2:]:
        return Op("depth_to_space", (product,), node.shape, node.layer, options={"by": (sh, sw)})
    image = low.new_value((n, o, *full))
    low.ops[image] = Op("depth_to_space", (product,), (n, o, *full), node.layer, options={"by": (sh, sw)})
    rows, columns = (slice(p, p + size) for p, size in zip(start, node.shape[2:], strict=True))
    crop = indexed(whole(image, (n, o, *full)), (slice(None), slice(None), rows, columns))
    assert crop is not None  # slices of an image are views
    low.views[number], low.cropped[image] = crop, number
    return True


def _cropped_phases(
    low: Lowering, node: Node, x: int, phases: Array, bias: Array | None, start: tuple[int, int]
) -> Op | None:
    """Lower a cropped transposed convolution to one convolution per phase, which computes no cropped pixel.

    `phases` are the filters, `start` is the first row and column of the crop. None if the phases have different sizes,
    or if so few channels per convolution would take longer than cropping.
    """
    (n, _, h, w), (sh, sw, o, _, *taps) = low.shapes[x], phases.shape
    if node.shape[2] % sh or node.shape[3] % sw:
        return None
    size = (node.shape[2] // sh, node.shape[3] // sw)
    groups, together = -(-o // _LANES) * sh * sw, -(-o * sh * sw // _LANES)
    if groups * math.prod(size) >= together * (h + taps[0] - 1) * (w + taps[1] - 1):
        return None
    convs = []
    for y, z in ((y, z) for y in range(sh) for z in range(sw)):
        # Pixel y of a block is phase (y + padding) % s, and its first one reads the input (y + padding) // s.
        (first_y, row), (first_x, column) = divmod(y + start[0], sh), divmod(z + start[1], sw)
        before = (taps[0] - 1 - first_y, taps[1] - 1 - first_x)
        after = (first_y + size[0] - h, first_x + size[1] - w)
        if min(*before, *after) < 0:
            return None
        options = {"stride": (1, 1), "padding": (*before, *after), "groups": 1, "dilation": (1, 1)}
        weight = np.ascontiguousarray(phases[row, column])
        convs.append(Op("conv", (x,), (n, o, *size), node.layer, weight=weight, bias=bias, options=options))
    results = [low.new_value(conv.shape) for conv in convs]
    low.ops.update(zip(results, convs, strict=True))
    joined = low.new_value((n, sh * sw * o, *size))
    low.ops[joined] = Op("concat", tuple(results), low.shapes[joined], node.layer)
    return Op("depth_to_space", (joined,), node.shape, node.layer, options={"by": (sh, sw)})


def _resample(low: Lowering, _number: int, node: Node) -> Op | None:
    """Lower resampling of rows or columns: nearest by an integer factor repeats pixels, other factors gather them."""
    x, axis, taps, value = low.image(node.inputs[0]), node.params["axis"], node.params["taps"], node.inputs[0]
    if x is None or not isinstance(value, Value) or len(node.shape) != 4 or axis % 4 not in (2, 3):
        return None
    _, _, height, width = low.shapes[value.number]
    positions, weights = np.asarray(taps.positions), np.asarray(taps.weights)
    by_rows, size = axis % 4 == 2, low.shapes[value.number][axis]
    # Nearest resampling has one tap per entry with weight 1.
    if len(positions) != 1 or not (weights == 1).all():
        if not low.is_float:
            return None
        numbers = {"positions": positions.ravel().tolist(), "weights": weights.astype(np.float32).ravel().tolist()}
        options = {"rows": by_rows, "taps": len(positions), **numbers}
        return Op("resample", (x,), node.shape, node.layer, options=options)
    factor = node.shape[axis] // size
    if np.array_equal(positions[0], np.repeat(np.arange(size), factor)):
        by = (factor, 1) if by_rows else (1, factor)
        return Op("upsample", (x,), node.shape, node.layer, options={"by": by})
    if not low.is_float:
        return None
    rows, columns = (positions[0], np.arange(width)) if by_rows else (np.arange(height), positions[0])
    return _gather_spatial(x, rows[:, None] * width + columns, node)


def _gather_spatial(x: int, positions: Array, node: Node) -> Op:
    """Return an op that gathers pixels of image `x`; `positions` (H', W') are flat indices y · W + x."""
    options = {"index": positions.reshape(-1).tolist(), "size": node.shape[2:]}
    return Op("gather_spatial", (x,), node.shape, node.layer, options=options)


def _get_item(low: Lowering, number: int, node: Node) -> Op | bool | None:
    """Lower indexing: index arrays for rows and columns of images, as in reflection padding, become a pixel gather."""
    source, index = node.inputs[0], node.params["index"]
    entries = index if isinstance(index, tuple) and len(index) == 4 else ()
    whole_images = all(isinstance(entry, slice) and entry == slice(None) for entry in entries[:2])
    by_pixel = whole_images and any(isinstance(entry, np.ndarray) for entry in entries)
    if not by_pixel or not low.is_float or not isinstance(source, Value) or len(node.shape) != 4:
        return lower_view_node(low, number, node)
    x, shape = low.image(source), low.shapes[source.number]
    if x is None or len(shape) != 4:
        return None
    height, width = shape[2:]
    return _gather_spatial(x, np.arange(height * width).reshape(height, width)[index[2:]], node)


# The lowering rule of each traced operation.
RULES: dict[str, LoweringRule] = {
    "Conv2d": _conv,
    "Linear": _linear,
    "DynamicLinear": lower_dynamic_linear,
    "FixedNorm": lower_batch_norm,
    "LayerNorm": _norm("layer_norm"),
    "GroupNorm": _norm("group_norm", of_images=True),
    "ChannelNorm": _norm("channel_norm", of_images=True),
    "RmsNorm": _norm("rms_norm"),
    "Attention": lower_attention,
    "PackedAttention": lower_packed_attention,
    "Recurrent": lower_recurrent,
    "MatMul": _matmul,
    "Add": lower_add,
    "Sub": lower_sub,
    "Mul": lower_mul,
    "MaxPool2d": _pool("max_pool"),
    "PaddedMaxPool": _pool("max_pool"),
    "AvgPool2d": _pool("avg_pool"),
    "UnpaddedAvgPool": _pool("avg_pool"),
    "GlobalAvgPool": _global_mean,
    "Mean": _mean,
    "Reshape": _reshape,
    "Permute": lower_view_node,
    "Cat": _cat,
    "GetItem": _get_item,
    "Expand": lower_view_node,
    "Resample": _resample,
    "ConvTranspose2d": _conv_transpose,
    **dict.fromkeys(("LeakyRelu", "Clip", "HardSigmoid", "GeluTanh"), lower_activation),
    **{a.operation: lower_activation for a in ACTIVATIONS.values() if a.operation},
}
