"""ONNX operations on bytes: quantizing and back. A network in QDQ form runs in float between them, rounded by them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.errors import DtypeError, ShapeError
from tilewise.onnx.graph import OnnxNode
from tilewise.onnx.operators.base import Array, Value, array, axis_of, computed, operator
from tilewise.onnx.reader import dtype_of

_BYTES = (np.int8, np.uint8, np.int16, np.uint16, np.int32)


def _along(node: OnnxNode, x: Value, scale: Array) -> Array:
    """Reshape a scale or zero point (one number, or one per entry of the axis) to broadcast over `x`."""
    if node.get("block_size", 0):
        raise ShapeError(f"{node} has a scale per block, which tilewise does not compute")
    if scale.size == 1:
        return scale.reshape(())
    axis = axis_of(node.get("axis", 1), len(x.shape), node)
    if scale.ndim != 1 or len(scale) != x.shape[axis]:
        raise ShapeError(f"{node} has scales of shape {scale.shape} for axis {axis} of {x.shape}")
    return scale.reshape([-1 if i == axis else 1 for i in range(len(x.shape))])


@operator("QuantizeLinear")
def _quantize(node: OnnxNode, x: Value, scale: Value, zero: Value | None = None) -> Value:
    """Quantize to the dtype of the zero point, or to `output_dtype`; NaN becomes 0."""
    kind: np.dtype[Any] = np.dtype(np.uint8)
    if zero is not None:
        kind = array(zero).dtype
    elif node.get("output_dtype", 0):
        kind = dtype_of(node.get("output_dtype", 0), node)
    if kind.type not in _BYTES:
        raise DtypeError(f"{node} quantizes to {kind}, which tilewise does not compute")
    by = _along(node, x, array(scale))
    shift = np.int64(0) if zero is None else _along(node, x, array(zero)).astype(np.int64)
    limits = np.iinfo(kind)

    def run(a: Array) -> Array:
        rounded = np.rint(np.nan_to_num(a / by, nan=0.0, posinf=1e9, neginf=-1e9)).astype(np.float64) + shift
        return np.clip(rounded, limits.min, limits.max).astype(kind)

    return computed(run, x, name=node.op)


@operator("DequantizeLinear")
def _dequantize(node: OnnxNode, x: Value, scale: Value, zero: Value | None = None) -> Value:
    if array(x).dtype.type not in _BYTES:
        raise DtypeError(f"{node} is given {array(x).dtype}, which tilewise does not take for bytes")
    by = _along(node, x, array(scale))
    shift = np.int64(0) if zero is None else _along(node, x, array(zero)).astype(np.int64)
    return computed(lambda a: ((a.astype(np.int64) - shift) * by).astype(by.dtype), x, name=node.op)


@operator("DynamicQuantizeLinear")
def _dynamic_quantize_linear(node: OnnxNode, x: Value) -> Any:
    """Quantize to uint8 with the range of the values; return integers, scale and zero point."""
    data = array(x)
    low, high = min(float(data.min(initial=0)), 0.0), max(float(data.max(initial=0)), 0.0)
    scale = np.float32((high - low) / 255) or np.float32(1)
    zero = np.uint8(np.clip(np.rint(-low / scale), 0, 255))
    q = computed(lambda a: np.clip(np.rint(a / scale) + zero, 0, 255).astype(np.uint8), x, name=node.op)
    return q, np.asarray(scale), np.asarray(zero)
