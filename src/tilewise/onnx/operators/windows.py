"""ONNX operations over images: convolutions, pooling, normalisation, resizing.

The kernels know symmetric padding of two-dimensional images. What ONNX allows beyond that is brought to it: a line is
an image of height one, uneven padding is added before, filters with holes are written out with zeros.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tilewise.errors import DtypeError, ShapeError
from tilewise.nn import functional as F
from tilewise.nn import resampling
from tilewise.onnx.graph import Node
from tilewise.onnx.operators.base import Value, array, choice, is_float, numbers, operator, room, tensor
from tilewise.tensor import Tensor, apply

Pads = list[tuple[int, int]]
_AUTO = ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")


def _spatial(node: Node, x: Value) -> int:
    """How many axes the windows move along: one or two."""
    rank = len(x.shape) - 2
    if rank not in (1, 2) or not is_float(x):
        raise ShapeError(
            f"{node} works on float images (N, C, H, W) or lines (N, C, L), not {array(x).dtype} {x.shape}"
        )
    return rank


def _setting(node: Node, name: str, rank: int, least: int, default: int = 1) -> list[int]:
    found = list(node.get(name, (default,) * rank))
    if len(found) != rank or any(not isinstance(n, int) or not least <= n < 1 << 31 for n in found):
        raise ShapeError(f"{node} has {name} {tuple(found)[:8]} for {rank} axes")
    return found


def _pads(node: Node, sizes: list[int], kernel: list[int], strides: list[int], dilations: list[int]) -> Pads:
    """(before, after) of each axis."""
    auto, rank = choice(node, "auto_pad", "NOTSET", _AUTO), len(sizes)
    if auto == "VALID":
        return [(0, 0)] * rank
    if auto == "NOTSET":
        found = _setting(node, "pads", 2 * rank, 0, 0)
        return [(found[i], found[i + rank]) for i in range(rank)]
    pads = []
    for size, k, s, d in zip(sizes, kernel, strides, dilations, strict=True):
        total = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
        less, more = total // 2, total - total // 2
        pads.append((less, more) if auto == "SAME_UPPER" else (more, less))
    return pads


def as_images(x: Tensor) -> Tensor:
    """(N, C, L) as (N, C, 1, L)."""
    return x if x.ndim == 4 else x.reshape(x.shape[0], x.shape[1], 1, x.shape[2])


def _as_before(y: Tensor, rank: int) -> Tensor:
    return y if rank == 2 else y.reshape(y.shape[0], y.shape[1], y.shape[3])


def _even(pads: Pads) -> bool:
    return all(before == after for before, after in pads)


def _pad_images(x: Tensor, pads: Pads, value: float = 0.0) -> Tensor:
    room([*x.shape[:2], *(n + a + b for n, (a, b) in zip(x.shape[2:], pads, strict=True))])
    return x.pad([(0, 0), (0, 0), *pads], value)


def _result_size(size: int, pads: tuple[int, int], kernel: int, stride: int) -> int:
    return (size + sum(pads) - kernel) // stride + 1


@operator("Conv")
def _conv(node: Node, x: Value, weight: Value, bias: Value | None = None) -> Value:
    rank = _spatial(node, x)
    if len(weight.shape) != rank + 2 or not is_float(weight):
        raise ShapeError(f"{node} has filters of shape {weight.shape} for an input of shape {x.shape}")
    kernel = list(weight.shape[2:])
    if tuple(node.get("kernel_shape", tuple(kernel))) != tuple(kernel):
        raise ShapeError(f"{node} says its kernel is {node.get('kernel_shape', ())} and has filters {weight.shape}")
    strides, dilations = _setting(node, "strides", rank, 1), _setting(node, "dilations", rank, 1)
    pads = _pads(node, list(x.shape[2:]), kernel, strides, dilations)
    images, filters = as_images(tensor(x)), as_images(tensor(weight))
    if rank == 1:
        strides, dilations, pads, kernel = [1, *strides], [1, *dilations], [(0, 0), *pads], [1, *kernel]
    if dilations != [1, 1]:
        room([*filters.shape[:2], *((k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True))])
        filters = apply(resampling.Dilate, filters, step=(dilations[0], dilations[1]))
    sizes = zip(images.shape[2:], pads, filters.shape[2:], strides, strict=True)
    room([images.shape[0], filters.shape[0], *(max(_result_size(n, p, k, s), 0) for n, p, k, s in sizes)])
    room([*images.shape[:2], *(n + sum(p) for n, p in zip(images.shape[2:], pads, strict=True))])
    if not _even(pads):
        images, pads = _pad_images(images, pads), [(0, 0), (0, 0)]
    padding = (pads[0][0], pads[1][0])
    shift = None if bias is None else tensor(bias)
    if shift is not None and shift.shape != filters.shape[:1]:
        raise ShapeError(f"{node} has a bias of shape {shift.shape} for filters {weight.shape}")
    y = F.conv2d(images, filters, shift, (strides[0], strides[1]), padding, node.get("group", 1))
    return _as_before(y, rank)


@operator("ConvTranspose")
def _conv_transpose(node: Node, x: Value, weight: Value, bias: Value | None = None) -> Value:
    rank = _spatial(node, x)
    if len(weight.shape) != rank + 2 or not is_float(weight):
        raise ShapeError(f"{node} has filters of shape {weight.shape} for an input of shape {x.shape}")
    kernel = list(weight.shape[2:])
    strides, dilations = _setting(node, "strides", rank, 1), _setting(node, "dilations", rank, 1)
    extra = _setting(node, "output_padding", rank, 0, 0)
    sizes = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(x.shape[2:], strides, kernel, dilations, strict=True)]
    pads = _transposed_pads(node, x, sizes, strides, extra)
    groups = node.get("group", 1)
    room([x.shape[0], weight.shape[1] * max(groups, 1), *(n + e for n, e in zip(sizes, extra, strict=True))])
    images, filters = as_images(tensor(x)), as_images(tensor(weight))
    if rank == 1:
        strides, dilations, pads, extra = [1, *strides], [1, *dilations], [(0, 0), *pads], [0, *extra]
    if dilations != [1, 1]:
        room([*filters.shape[:2], *((k - 1) * d + 1 for k, d in zip(filters.shape[2:], dilations, strict=True))])
        filters = apply(resampling.Dilate, filters, step=(dilations[0], dilations[1]))
    full = F.conv_transpose2d(images, filters, None, (strides[0], strides[1]), 0, 0, groups)
    y = _cut(full, pads, extra, node)
    y = y if bias is None else y + tensor(bias).reshape(-1, 1, 1)
    return _as_before(y, rank)


def _transposed_pads(node: Node, x: Value, sizes: list[int], strides: list[int], extra: list[int]) -> Pads:
    """What is cut off before and after each axis of the full result; where more is wanted, `extra` grows."""
    auto, rank = choice(node, "auto_pad", "NOTSET", _AUTO), len(sizes)
    wanted = node.get("output_shape", ())
    if not wanted and auto in ("NOTSET", "VALID"):
        return _pads(node, list(x.shape[2:]), sizes, strides, [1] * rank)
    if wanted and (len(wanted) != rank or min(wanted) < 1):
        raise ShapeError(f"{node} wants a result of {wanted[:8]}")
    if not wanted:
        wanted = tuple(n * s for n, s in zip(x.shape[2:], strides, strict=True))
    pads = []
    for i, size in enumerate(wanted):
        extra[i] = max(extra[i], size - sizes[i])
        total = max(sizes[i] + extra[i] - size, 0)
        half = total // 2
        pads.append((half, total - half) if auto == "SAME_UPPER" else (total - half, half))
    return pads


def _cut(y: Tensor, pads: Pads, extra: list[int], node: Node) -> Tensor:
    if any(extra):
        y = _pad_images(y, [(0, e) for e in extra])
    ends = [n - after for n, (_, after) in zip(y.shape[2:], pads, strict=True)]
    if any(end - before < 1 for end, (before, _) in zip(ends, pads, strict=True)):
        raise ShapeError(f"{node} cuts off all of its result")
    if not any(map(any, pads)):
        return y
    return y[:, :, pads[0][0] : ends[0], pads[1][0] : ends[1]]


# --- pooling ---


def _with_ceiling(node: Node, sizes: list[int], kernel: list[int], strides: list[int], pads: Pads) -> Pads:
    """Padding behind, so that a last window that lies partly outside counts, where the node asks for that."""
    if not node.get("ceil_mode", 0):
        return pads
    out = []
    for n, k, s, (before, after) in zip(sizes, kernel, strides, pads, strict=True):
        count = -(-(n + before + after - k) // s) + 1
        if (count - 1) * s >= n + before:  # a window that starts in the padding behind does not count
            count -= 1
        out.append((before, max((count - 1) * s + k - n - before, after if not node.get("ceil_mode", 0) else 0)))
    return out


@operator("MaxPool", "AveragePool")
def _pool(node: Node, x: Value) -> Value:
    rank = _spatial(node, x)
    kernel, strides = _setting(node, "kernel_shape", rank, 1), _setting(node, "strides", rank, 1)
    if set(node.get("dilations", (1,))) != {1} or len(node.outputs) > 1:
        raise ShapeError(f"{node} has windows with holes, or asks for positions, which tilewise does not compute")
    sizes = list(x.shape[2:])
    asked = _pads(node, sizes, kernel, strides, [1] * rank)
    pads = _with_ceiling(node, sizes, kernel, strides, asked)
    images = as_images(tensor(x))
    if rank == 1:
        kernel, strides, pads, asked = [1, *kernel], [1, *strides], [(0, 0), *pads], [(0, 0), *asked]
    room([*images.shape[:2], *(n + sum(p) for n, p in zip(images.shape[2:], pads, strict=True))])
    average = node.op == "AveragePool"
    scale = _share_of_windows(node, images, kernel, strides, pads, asked) if average else None
    small = all(2 * p[0] <= k for p, k in zip(pads, kernel, strict=True))
    if not _even(pads) or not small:
        images, pads = _pad_images(images, pads, 0.0 if average else -math.inf), [(0, 0), (0, 0)]
    pool = F.avg_pool2d if average else F.max_pool2d
    y = pool(images, (kernel[0], kernel[1]), (strides[0], strides[1]), (pads[0][0], pads[1][0]))
    return _as_before(y if scale is None else y * Tensor(scale), rank)


def _share_of_windows(
    node: Node, images: Tensor, kernel: list[int], strides: list[int], pads: Pads, asked: Pads
) -> Any:
    """What to multiply means over whole windows by, (H, W), where some of a window does not count."""
    counted = asked if node.get("count_include_pad", 0) else [(0, 0), (0, 0)]
    if counted == pads:
        return None
    along = []
    for n, k, s, p, c in zip(images.shape[2:], kernel, strides, pads, counted, strict=True):
        starts = np.arange(_result_size(n, p, k, s)) * s - p[0]
        inside = np.minimum(starts + k, n + c[1]) - np.maximum(starts, -c[0])
        along.append(k / np.maximum(inside, 1))
    return (along[0][:, None] * along[1][None, :]).astype(images.dtype)


@operator("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(node: Node, x: Value) -> Value:
    if len(x.shape) < 3 or not math.prod(x.shape[2:]) or not is_float(x):
        raise ShapeError(f"{node} takes images, not a tensor of shape {x.shape}")
    axes, t = tuple(range(2, len(x.shape))), tensor(x)
    if node.op == "GlobalMaxPool":
        return t.max(axes, True)
    if t.ndim == 4:
        return F.global_avg_pool(t).reshape(*t.shape[:2], 1, 1)
    return t.mean(axes, True)


# --- normalisation ---


@operator("BatchNormalization")
def _batch_norm(node: Node, x: Value, weight: Value, bias: Value, mean: Value, var: Value) -> Value:
    if len(node.outputs) > 1 or node.get("training_mode", 0):
        raise ShapeError(f"{node} updates its statistics; export the network in eval mode")
    if not is_float(x, weight, bias, mean, var) or mean.shape != weight.shape or var.shape != weight.shape:
        raise ShapeError(f"{node} has statistics of shape {mean.shape} and a weight of shape {weight.shape}")
    return F.batch_norm(
        tensor(x), tensor(mean), tensor(var), tensor(weight), tensor(bias), eps=node.get("epsilon", 1e-5)
    )


@operator("LayerNormalization")
def _layer_norm(node: Node, x: Value, weight: Value, bias: Value | None = None) -> Any:
    axis = node.get("axis", -1)
    axis = axis + len(x.shape) if axis < 0 else axis
    if not 0 <= axis < len(x.shape) or not is_float(x, weight):
        raise ShapeError(f"{node} normalises axis {axis} of {array(x).dtype} of shape {x.shape}")
    inner, eps = tuple(x.shape[axis:]), node.get("epsilon", 1e-5)
    scale = tensor(weight)
    scale = scale if scale.shape == inner else scale.expand(*inner).contiguous()
    shift = Tensor(np.zeros(inner, scale.dtype)) if bias is None else tensor(bias)
    shift = shift if shift.shape == inner else shift.expand(*inner).contiguous()
    result = F.layer_norm(tensor(x), scale, shift, eps)
    if len(node.outputs) == 1:
        return result
    axes = tuple(range(axis, len(x.shape)))
    return result, tensor(x).mean(axes, True), 1.0 / (tensor(x).var(axes, True, 0) + eps).sqrt()


@operator("RMSNormalization")
def _rms_norm(node: Node, x: Value, weight: Value) -> Value:
    axis = node.get("axis", -1)
    axis = axis + len(x.shape) if axis < 0 else axis
    if not 0 <= axis < len(x.shape) or not is_float(x, weight):
        raise ShapeError(f"{node} normalises axis {axis} of {x.shape}")
    t, axes = tensor(x), tuple(range(axis, len(x.shape)))
    size: Tensor = ((t * t).mean(axes, True) + node.get("epsilon", 1e-5)).sqrt()
    return t / size * tensor(weight)


@operator("InstanceNormalization")
def _instance_norm(node: Node, x: Value, weight: Value, bias: Value) -> Value:
    if len(x.shape) < 3 or not is_float(x, weight, bias):
        raise ShapeError(f"{node} takes images, not a tensor of shape {x.shape}")
    return F.group_norm(tensor(x), x.shape[1], tensor(weight), tensor(bias), node.get("epsilon", 1e-5))


@operator("GroupNormalization")
def _group_norm(node: Node, x: Value, weight: Value, bias: Value) -> Value:
    groups = node.get("num_groups", 1)
    if len(x.shape) < 3 or not is_float(x, weight, bias) or groups < 1 or x.shape[1] % groups:
        raise ShapeError(f"{node} cuts a tensor of shape {x.shape} into {groups} groups")
    scale, shift = tensor(weight), tensor(bias)
    if node.opset < 21 and scale.shape == (groups,):  # before version 21: one number a group
        each = np.repeat(np.arange(groups), x.shape[1] // groups)
        scale, shift = scale[each], shift[each]
    return F.group_norm(tensor(x), groups, scale, shift, node.get("epsilon", 1e-5))


@operator("LpNormalization")
def _lp_norm(node: Node, x: Value) -> Value:
    axis, p, t = node.get("axis", -1), node.get("p", 2), tensor(x)
    if not -t.ndim <= axis < t.ndim or p not in (1, 2):
        raise ShapeError(f"{node} normalises axis {axis} of {x.shape} by the {p}-norm")
    size = abs(t).sum(axis, True) if p == 1 else (t * t).sum(axis, True).sqrt()
    result: Tensor = t / (size + Tensor((size.data == 0).astype(t.dtype)))  # nothing but zeros stays zeros
    return result


@operator("LRN")
def _lrn(node: Node, x: Value) -> Value:
    size = node.get("size", 1)
    if len(x.shape) < 3 or not 1 <= size <= 2 * x.shape[1] + 1 or not is_float(x):
        raise ShapeError(f"{node} normalises over {size} channels of {x.shape}")
    t = tensor(x)
    before = (size - 1) // 2
    squares = (t * t).pad([(0, 0), (before, size - 1 - before), *[(0, 0)] * (t.ndim - 2)])
    total = squares[:, : t.shape[1]]
    for i in range(1, size):
        total = total + squares[:, i : i + t.shape[1]]
    scale = total * (node.get("alpha", 1e-4) / size) + node.get("bias", 1.0)
    result: Tensor = t / scale ** node.get("beta", 0.75)
    return result


# --- resizing ---

_COORDINATES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")


@operator("Resize")
def _resize(
    node: Node, x: Value, roi: Value | None = None, scales: Value | None = None, sizes: Value | None = None
) -> Value:
    mode = choice(node, "mode", "nearest", ("nearest", "linear", "cubic"))
    choice(node, "coordinate_transformation_mode", "half_pixel", _COORDINATES)
    if node.get("antialias", 0) or not is_float(x):
        raise DtypeError(f"{node} resizes {array(x).dtype}, or smooths before, which tilewise does not compute")
    axes = [a + len(x.shape) if a < 0 else a for a in node.get("axes", tuple(range(len(x.shape))))]
    wanted = _wanted_sizes(node, x, axes, scales, sizes)
    shape = list(x.shape)
    for axis, size, _ in wanted:
        shape[axis] = size
    room(shape, array(x).itemsize)
    result = tensor(x)
    for axis, size, scale in wanted:
        if size != result.shape[axis] or scale != 1:
            result = apply(resampling.Resample, result, taps=_taps(node, mode, x.shape[axis], size, scale), axis=axis)
    return result


def _wanted_sizes(
    node: Node, x: Value, axes: list[int], scales: Value | None, sizes: Value | None
) -> list[tuple[int, int, float]]:
    """(axis, its size after, the scale) of each axis that the node names."""
    factors = None if scales is None or not scales.shape[0] else array(scales)
    if any(not 0 <= a < len(x.shape) for a in axes) or len(set(axes)) != len(axes) or 0 in x.shape:
        raise ShapeError(f"{node} resizes axes {axes} of a tensor of shape {x.shape}")
    if factors is not None:
        if factors.ndim != 1 or len(factors) != len(axes) or not np.isfinite(factors).all() or (factors <= 0).any():
            raise ShapeError(f"{node} has scales of shape {factors.shape} for {len(axes)} axes, or odd ones")
        return [(a, max(math.floor(x.shape[a] * float(f)), 0), float(f)) for a, f in zip(axes, factors, strict=True)]
    wanted = [] if sizes is None else numbers(sizes)
    if len(wanted) != len(axes) or min(wanted, default=0) < 1:
        raise ShapeError(f"{node} has neither scales nor sizes for its {len(axes)} axes")
    policy = choice(node, "keep_aspect_ratio_policy", "stretch", ("stretch", "not_larger", "not_smaller"))
    if policy == "stretch":
        return [(a, n, n / x.shape[a]) for a, n in zip(axes, wanted, strict=True)]
    pick = min if policy == "not_larger" else max
    scale = pick(n / x.shape[a] for a, n in zip(axes, wanted, strict=True))
    return [(a, math.floor(x.shape[a] * scale + 0.5), scale) for a in axes]


def _taps(node: Node, mode: str, size: int, wanted: int, scale: float) -> resampling.Taps:
    out = np.arange(wanted, dtype=np.float64)
    how = node.get("coordinate_transformation_mode", "half_pixel")
    if how == "align_corners":
        places = out * ((size - 1) / (wanted - 1)) if wanted > 1 else np.zeros(wanted)
    elif how == "asymmetric":
        places = out / scale
    elif how == "half_pixel_symmetric":
        adjust = wanted / (scale * size)
        places = size / 2 * (1 - adjust) + (out + 0.5) / scale - 0.5
    elif how == "pytorch_half_pixel" and wanted == 1:
        places = np.zeros(1)
    else:
        places = (out + 0.5) / scale - 0.5
    if mode == "linear":
        return resampling.linear_taps(places, size)
    if mode == "cubic":
        leave_out = bool(node.get("exclude_outside", 0))
        return resampling.cubic_taps(places, size, node.get("cubic_coeff_a", -0.75), leave_out)
    return resampling.nearest_taps(_nearest(node, places), size)


def _nearest(node: Node, places: Any) -> Any:
    kinds = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
    kind = choice(node, "nearest_mode", "round_prefer_floor", kinds)
    if kind == "floor":
        return np.floor(places)
    if kind == "ceil":
        return np.ceil(places)
    return np.ceil(places - 0.5) if kind == "round_prefer_floor" else np.floor(places + 0.5)
