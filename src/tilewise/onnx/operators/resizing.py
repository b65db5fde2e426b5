"""ONNX's Resize: each axis on its own, by the nearest entry, two neighbours or four."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tilewise.errors import DtypeError, ShapeError
from tilewise.nn import resampling
from tilewise.onnx.graph import OnnxNode
from tilewise.onnx.operators.base import (
    Value,
    array,
    check_size,
    choice,
    is_float,
    numbers,
    operator,
    read_values,
    tensor,
)
from tilewise.tensor import apply

_COORDINATES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")


@operator("Resize")
def _resize(
    node: OnnxNode, x: Value, roi: Value | None = None, scales: Value | None = None, sizes: Value | None = None
) -> Value:
    """Resize the named axes one after the other."""
    mode = choice(node, "mode", "nearest", ("nearest", "linear", "cubic"))
    choice(node, "coordinate_transformation_mode", "half_pixel", _COORDINATES)
    if node.get("antialias", 0) or not is_float(x):
        raise DtypeError(f"{node} resizes {array(x).dtype}, or smooths before, which tilewise does not compute")
    axes = [a + len(x.shape) if a < 0 else a for a in node.get("axes", tuple(range(len(x.shape))))]
    target_sizes = _target_sizes(node, x, axes, scales, sizes)
    shape = list(x.shape)
    for axis, size, _ in target_sizes:
        shape[axis] = size
    check_size(shape, array(x).itemsize)
    result = tensor(x)
    for axis, size, scale in target_sizes:
        if size != result.shape[axis] or scale != 1:
            result = apply(resampling.Resample, result, taps=_taps(node, mode, x.shape[axis], size, scale), axis=axis)
    return result


def _target_sizes(
    node: OnnxNode, x: Value, axes: list[int], scales: Value | None, sizes: Value | None
) -> list[tuple[int, int, float]]:
    """Return (axis, new size, scale) of each axis that the node names."""
    factors = None if scales is None or not scales.shape[0] else read_values(scales)
    if any(not 0 <= a < len(x.shape) for a in axes) or len(set(axes)) != len(axes) or 0 in x.shape:
        raise ShapeError(f"{node} resizes axes {axes} of a tensor of shape {x.shape}")
    if factors is not None:
        if factors.ndim != 1 or len(factors) != len(axes) or not np.isfinite(factors).all() or (factors <= 0).any():
            raise ShapeError(f"{node} has scales of shape {factors.shape} for {len(axes)} axes, or odd ones")
        return [(a, max(math.floor(x.shape[a] * float(f)), 0), float(f)) for a, f in zip(axes, factors, strict=True)]
    target_sizes = [] if sizes is None else numbers(sizes)
    if len(target_sizes) != len(axes) or min(target_sizes, default=0) < 1:
        raise ShapeError(f"{node} has neither scales nor sizes for its {len(axes)} axes")
    policy = choice(node, "keep_aspect_ratio_policy", "stretch", ("stretch", "not_larger", "not_smaller"))
    if policy == "stretch":
        return [(a, n, n / x.shape[a]) for a, n in zip(axes, target_sizes, strict=True)]
    pick = min if policy == "not_larger" else max
    scale = pick(n / x.shape[a] for a, n in zip(axes, target_sizes, strict=True))
    return [(a, math.floor(x.shape[a] * scale + 0.5), scale) for a in axes]


def _taps(node: OnnxNode, mode: str, size: int, target: int, scale: float) -> resampling.Taps:
    """Return the input positions and weights of every output position along one axis."""
    out = np.arange(target, dtype=np.float64)
    how = node.get("coordinate_transformation_mode", "half_pixel")
    if how == "align_corners":
        places = out * ((size - 1) / (target - 1)) if target > 1 else np.zeros(target)
    elif how == "asymmetric":
        places = out / scale
    elif how == "half_pixel_symmetric":
        adjust = target / (scale * size)
        places = size / 2 * (1 - adjust) + (out + 0.5) / scale - 0.5
    elif how == "pytorch_half_pixel" and target == 1:
        places = np.zeros(1)
    else:
        places = (out + 0.5) / scale - 0.5
    if mode == "linear":
        return resampling.linear_taps(places, size)
    if mode == "cubic":
        leave_out = bool(node.get("exclude_outside", 0))
        return resampling.cubic_taps(places, size, node.get("cubic_coeff_a", -0.75), leave_out)
    return resampling.nearest_taps(_nearest(node, places), size)


def _nearest(node: OnnxNode, places: Any) -> Any:
    kinds = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
    kind = choice(node, "nearest_mode", "round_prefer_floor", kinds)
    if kind == "floor":
        return np.floor(places)
    if kind == "ceil":
        return np.ceil(places)
    return np.ceil(places - 0.5) if kind == "round_prefer_floor" else np.floor(places + 0.5)
