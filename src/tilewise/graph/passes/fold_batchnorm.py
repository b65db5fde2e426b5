"""Batch norm folding: a per-channel scale and shift goes into the weights of the layer before it.

This is the only place of the graph that folds norms. The scale is stored as the op's `gain` and multiplied into the
weights when they are packed (Jacob et al. 2018, section 3.2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tilewise.graph.ir import Array, Node, Op
from tilewise.graph.passes.rewriter import per_channel, value_and_constant

if TYPE_CHECKING:
    from tilewise.graph.passes.lower import Lowering


def lower_batch_norm(low: Lowering, number: int, node: Node) -> Op | bool | None:
    """Lower an inference batch norm: fold it into the layer before (True), or return an affine op; else None."""
    x, weight, bias = low.image(node.inputs[0]), node.inputs[1], node.inputs[2]
    mean, var = node.params["mean"], node.params["var"]
    statistics = (weight, bias, mean, var)
    if x is None or not all(isinstance(a, np.ndarray) and a.dtype == np.float32 and a.size for a in statistics):
        return None
    scale = np.asarray(weight / np.sqrt(var + np.float32(node.params["eps"])), np.float32)
    # scale = weight / sqrt(var + eps), shift = bias - mean · scale
    shift = np.asarray(bias - mean * scale, np.float32)
    return scale_and_shift(low, number, node, x, scale=scale, shift=shift)


def scale_and_shift(low: Lowering, number: int, node: Node, x: int, *, scale: Array, shift: Array) -> Op | bool:
    """Lower x · scale + shift (per channel): fold it into the layer that computes x (True), or return an affine op."""
    # (W x + b) * scale + shift = (scale W) x + (b * scale + shift), Jacob et al. 2018, section 3.2.
    layer = low.sole_consumer(x, "conv", *(["linear"] if low.is_float else []))
    if layer is not None and len(layer.inputs) == 1:
        bias = shift if layer.bias is None else layer.bias * scale + shift
        gain = scale if layer.gain is None else layer.gain * scale
        return low.fuse_into(number, x, gain=gain, bias=bias, layer=layer.layer)
    # Depth-to-space only moves the convolution's result: each of its channels serves `repeats` convolution channels.
    convs, repeats = low.convs_before_movement(x) if low.is_float else ([], 1)
    for conv in convs:
        tiled_scale, tiled_shift = np.tile(scale, repeats), np.tile(shift, repeats)
        conv.bias = tiled_shift if conv.bias is None else conv.bias * tiled_scale + tiled_shift
        conv.gain = tiled_scale if conv.gain is None else conv.gain * tiled_scale
    if convs:
        low.add_alias(number, x)
        return True
    return Op("affine", (x,), node.shape, node.layer, weight=scale, bias=shift)


def lower_with_constant(low: Lowering, number: int, node: Node, product: bool) -> Op | bool | None:
    """Lower a sum or product with a constant: fold it per channel (True), or return a binary op; else None."""
    operands = value_and_constant(node)
    if operands is None or low.shapes[operands[0].number] != node.shape:
        return None
    x, constant = low.any_layout(operands[0]), np.asarray(operands[1])
    if x is None:
        return None
    channels_last = x in low.channels_last or len(node.shape) == 3
    channels = per_channel(constant, node.shape, len(node.shape) - 1 if channels_last else 1)
    if channels is None:
        return _full_constant(low, node, x, constant, product) if low.is_float else None
    one, zero = np.ones_like(channels), np.zeros_like(channels)
    scale, shift = (channels, zero) if product else (one, channels)
    return scale_and_shift(low, number, node, x, scale=scale, shift=shift)


def _full_constant(low: Lowering, node: Node, x: int, constant: Array, product: bool) -> Op:
    """Return a binary op of value `x` and a constant of the same shape, such as position embeddings."""
    other = low.constant(np.broadcast_to(constant, node.shape).astype(np.float32))
    low.fix_layout(other, x in low.channels_last)
    return Op("mul" if product else "add", (x, other), node.shape, node.layer)
