"""ONNX operations over windows of images: convolutions and pooling.

Convolutions run natively with any padding and dilation. The other kernels know symmetric padding of two-dimensional
images: for them uneven padding is added to the input first, and the filters of a dilated transposed convolution are
filled up with zeros. A line (N, C, L) is an image of height one.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import numpy as np

from tilewise.errors import ShapeError, UnavailableError
from tilewise.nn import functional as F
from tilewise.nn import resampling
from tilewise.onnx.graph import OnnxNode
from tilewise.onnx.operators.base import Value, array, check_size, choice, is_float, operator, tensor
from tilewise.tensor import Tensor, apply, cat

Pads = list[tuple[int, int]]
_AUTO = ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")


def _spatial(node: OnnxNode, x: Value) -> int:
    """Return the number of spatial axes (one to three) that the windows move along."""
    rank = len(x.shape) - 2
    supported = (1, 2) if node.op == "ConvTranspose" else (1, 2, 3)
    if rank not in supported or not is_float(x):
        raise ShapeError(
            f"{node} works on float lines (N, C, L), images (N, C, H, W) or volumes, not {array(x).dtype} {x.shape}"
        )
    return rank


def _spatial_attribute(node: OnnxNode, name: str, rank: int, least: int, default: int = 1) -> list[int]:
    """Return an integer attribute for each spatial axis, at least two: a one-dimensional input gets a height of one.

    `least` is the smallest valid value.
    """
    values = list(node.get(name, (default,) * rank))
    if len(values) != rank or any(not isinstance(n, int) or not least <= n < 1 << 31 for n in values):
        raise ShapeError(f"{node} has {name} {tuple(values)[:8]} for {rank} axes")
    return [default] * (2 - rank) + values


def _pads(
    node: OnnxNode, rank: int, sizes: list[int], kernel: list[int], strides: list[int], dilations: list[int]
) -> Pads:
    """Return the padding (before, after) of each spatial axis, also for `auto_pad`."""
    auto = choice(node, "auto_pad", "NOTSET", _AUTO)
    if auto == "VALID":
        return [(0, 0)] * len(sizes)
    if auto == "NOTSET":
        explicit = _spatial_attribute(node, "pads", 2 * rank, 0, 0)
        return [(0, 0)] * (2 - rank) + [(explicit[i], explicit[i + rank]) for i in range(rank)]
    pads = []
    for size, k, s, d in zip(sizes, kernel, strides, dilations, strict=True):
        total = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
        less, more = total // 2, total - total // 2
        pads.append((less, more) if auto == "SAME_UPPER" else (more, less))
    return pads


def _as_images(x: Value) -> Tensor:
    """Reshape (N, C, L) to (N, C, 1, L)."""
    t = tensor(x)
    return t.reshape(t.shape[0], t.shape[1], 1, t.shape[2]) if t.ndim == 3 else t


def _as_before(y: Tensor, rank: int) -> Tensor:
    return y.reshape(y.shape[0], y.shape[1], y.shape[3]) if rank == 1 else y


def _check_filters(node: OnnxNode, x: Value, weight: Value, rank: int) -> None:
    if len(weight.shape) != rank + 2 or not is_float(weight):
        raise ShapeError(f"{node} has filters of shape {weight.shape} for an input of shape {x.shape}")


def _even(pads: Pads) -> bool:
    return all(before == after for before, after in pads)


def _pad_images(x: Tensor, pads: Pads, value: float = 0.0) -> Tensor:
    check_size([*x.shape[:2], *(n + a + b for n, (a, b) in zip(x.shape[2:], pads, strict=True))])
    return x.pad([(0, 0), (0, 0), *pads], value)


def _result_size(size: int, pads: tuple[int, int], kernel: int, stride: int) -> int:
    return (size + sum(pads) - kernel) // stride + 1


@operator("Conv")
def _conv(node: OnnxNode, x: Value, weight: Value, bias: Value | None = None) -> Value:
    """Convolve over one, two or three axes: (N, C, ...) with filters (O, C / groups, ...)."""
    rank = _spatial(node, x)
    _check_filters(node, x, weight, rank)
    if tuple(node.get("kernel_shape", tuple(weight.shape[2:]))) != tuple(weight.shape[2:]):
        raise ShapeError(f"{node} states a kernel of {node.get('kernel_shape', ())} and has filters {weight.shape}")
    shift = None if bias is None else tensor(bias)
    if shift is not None and shift.shape != weight.shape[:1]:
        raise ShapeError(f"{node} has a bias of shape {shift.shape} for filters {weight.shape}")
    images, filters = _as_images(x), _as_images(weight)
    strides, dilations = _spatial_attribute(node, "strides", rank, 1), _spatial_attribute(node, "dilations", rank, 1)
    sizes, kernel = list(images.shape[2:]), list(filters.shape[2:])
    pads = _pads(node, rank, sizes, kernel, strides, dilations)
    if rank == 3:
        return conv_volume(node, images, filters, shift, strides=strides, dilations=dilations, pads=pads)
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    results = [max(_result_size(*each), 0) for each in zip(sizes, pads, reach, strides, strict=True)]
    check_size([images.shape[0], filters.shape[0], *results])
    check_size([*images.shape[:2], *(n + sum(p) for n, p in zip(sizes, pads, strict=True))])
    (top, bottom), (left, right) = pads
    padding = (top, left) if _even(pads) else (top, left, bottom, right)
    stride, dilation = (strides[0], strides[1]), (dilations[0], dilations[1])
    return _as_before(F.conv2d(images, filters, shift, stride, padding, node.get("group", 1), dilation=dilation), rank)


@operator("ConvTranspose")
def _conv_transpose(node: OnnxNode, x: Value, weight: Value, bias: Value | None = None) -> Value:
    """Compute a transposed convolution, padded or cropped to the size that the node asks for."""
    rank = _spatial(node, x)
    _check_filters(node, x, weight, rank)
    images, filters = _as_images(x), _as_images(weight)
    strides, dilations = _spatial_attribute(node, "strides", rank, 1), _spatial_attribute(node, "dilations", rank, 1)
    extra, groups = _spatial_attribute(node, "output_padding", rank, 0, 0), node.get("group", 1)
    every = zip(images.shape[2:], strides, filters.shape[2:], dilations, strict=True)
    sizes = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in every]
    pads = _transposed_pads(node, rank, images, sizes, strides, extra)
    check_size([x.shape[0], weight.shape[1] * max(groups, 1), *(n + e for n, e in zip(sizes, extra, strict=True))])
    if dilations != [1, 1]:
        check_size([*filters.shape[:2], *((k - 1) * d + 1 for k, d in zip(filters.shape[2:], dilations, strict=True))])
        filters = apply(resampling.Dilate, filters, step=(dilations[0], dilations[1]))
    stride = (strides[0], strides[1])
    if _even(pads) and all(e < s for e, s in zip(extra, strides, strict=True)) and _keeps_some(sizes, extra, pads):
        shift = None if bias is None else tensor(bias)
        padding = (pads[0][0], pads[1][0])
        more = (extra[0], extra[1])
        y = F.conv_transpose2d(images, filters, shift, stride, padding, output_padding=more, groups=groups)
        return _as_before(y, rank)
    full = F.conv_transpose2d(images, filters, None, stride, groups=groups)
    y = _crop_result(full, pads, extra, node)
    return _as_before(y if bias is None else y + tensor(bias).reshape(-1, 1, 1), rank)


def _transposed_pads(
    node: OnnxNode, rank: int, images: Tensor, sizes: list[int], strides: list[int], extra: list[int]
) -> Pads:
    """Return how much to crop before and after each axis of a transposed convolution's full result.

    `extra` (output padding) is increased in place if the result has to be larger.
    """
    auto, target = choice(node, "auto_pad", "NOTSET", _AUTO), node.get("output_shape", ())
    if not target and auto in ("NOTSET", "VALID"):
        return _pads(node, rank, list(images.shape[2:]), sizes, strides, [1, 1])
    if target and (len(target) != rank or min(target) < 1):
        raise ShapeError(f"{node} asks for a result of {target[:8]}")
    lifted = [n * s for n, s in zip(images.shape[2:], strides, strict=True)] if not target else [1] * (2 - rank)
    target = (*lifted, *target)
    pads = []
    for i, size in enumerate(target):
        extra[i] = max(extra[i], size - sizes[i])
        total = max(sizes[i] + extra[i] - size, 0)
        half = total // 2
        pads.append((half, total - half) if auto == "SAME_UPPER" else (total - half, half))
    return pads


def _keeps_some(sizes: list[int], extra: list[int], pads: Pads) -> bool:
    return all(n + e - sum(pad) > 0 for n, e, pad in zip(sizes, extra, pads, strict=True))


def _crop_result(y: Tensor, pads: Pads, extra: list[int], node: OnnxNode) -> Tensor:
    """Remove the padding from the result of a transposed convolution."""
    if any(extra):
        y = _pad_images(y, [(0, e) for e in extra])
    ends = [n - after for n, (_, after) in zip(y.shape[2:], pads, strict=True)]
    if any(end - before < 1 for end, (before, _) in zip(ends, pads, strict=True)):
        raise ShapeError(f"{node} crops its whole result")
    if not any(map(any, pads)):
        return y
    return y[:, :, pads[0][0] : ends[0], pads[1][0] : ends[1]]


# --- pooling ---


def _with_ceiling(node: OnnxNode, sizes: list[int], kernel: list[int], strides: list[int], pads: Pads) -> Pads:
    """Extend the end padding if ceiling mode adds a last window that is partly outside of the input."""
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
def _pool(node: OnnxNode, x: Value) -> Value:
    """Pool (N, C, ...) over one, two or three axes by maximum or mean, as the node says."""
    rank = _spatial(node, x)
    kernel, strides = _spatial_attribute(node, "kernel_shape", rank, 1), _spatial_attribute(node, "strides", rank, 1)
    if set(node.get("dilations", (1,))) != {1} or len(node.outputs) > 1:
        raise ShapeError(f"{node} has dilated windows, or asks for indices, which tilewise does not support")
    images = _as_images(x)
    sizes = list(images.shape[2:])
    requested = _pads(node, rank, sizes, kernel, strides, [1] * len(sizes))
    pads = _with_ceiling(node, sizes, kernel, strides, requested)
    if rank == 3:
        return pool_volume(node, images, kernel, strides, pads)
    check_size([*images.shape[:2], *(n + sum(p) for n, p in zip(sizes, pads, strict=True))])
    average = node.op == "AveragePool"
    scale = _mean_correction(node, images, kernel, strides, pads, requested) if average else None
    small = all(2 * p[0] <= k for p, k in zip(pads, kernel, strict=True))
    if not _even(pads) or not small:
        images, pads = _pad_images(images, pads, 0.0 if average else -math.inf), [(0, 0), (0, 0)]
    pool = F.avg_pool2d if average else F.max_pool2d
    y = pool(images, (kernel[0], kernel[1]), (strides[0], strides[1]), (pads[0][0], pads[1][0]))
    return _as_before(y if scale is None else y * Tensor(scale), rank)


def _mean_correction(
    node: OnnxNode, images: Tensor, kernel: list[int], strides: list[int], pads: Pads, requested: Pads
) -> Any:
    """Return factors (H', W') that turn means over whole windows into means over the positions that count, or None."""
    counting = requested if node.get("count_include_pad", 0) else [(0, 0), (0, 0)]
    if counting == pads:
        return None
    along = []
    for n, k, s, p, c in zip(images.shape[2:], kernel, strides, pads, counting, strict=True):
        starts = np.arange(_result_size(n, p, k, s)) * s - p[0]
        inside = np.minimum(starts + k, n + c[1]) - np.maximum(starts, -c[0])
        along.append(k / np.maximum(inside, 1))
    return (along[0][:, None] * along[1][None, :]).astype(images.dtype)


@operator("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(node: OnnxNode, x: Value) -> Value:
    """Evaluate GlobalAveragePool and GlobalMaxPool: (N, C, ...) to (N, C, 1, ...)."""
    if len(x.shape) < 3 or not math.prod(x.shape[2:]) or not is_float(x):
        raise ShapeError(f"{node} takes images, not a tensor of shape {x.shape}")
    axes, t = tuple(range(2, len(x.shape))), tensor(x)
    if node.op == "GlobalMaxPool":
        return t.max(axes, True)
    if t.ndim == 4:
        return F.global_avg_pool(t).reshape(*t.shape[:2], 1, 1)
    return t.mean(axes, True)


# --- volumes ---


def _slices_of_taps(frames: Tensor, taps: int, stride: int, dilation: int) -> list[Tensor]:
    """Return, for each tap in depth, the frames of (N, D, C, H, W) that it reads: (N · slices, C, H, W)."""
    n, depth, c, h, w = frames.shape
    slices = (depth - (taps - 1) * dilation - 1) // stride + 1
    check_size([n, slices, taps * c, h, w])
    firsts = [tap * dilation for tap in range(taps)]
    per_tap = [frames[:, first : first + (slices - 1) * stride + 1 : stride] for first in firsts]
    return [images.reshape(n * slices, c, h, w) for images in per_tap]


def _as_volume(images: Tensor, n: int) -> Tensor:
    """Reshape (N · D, C, H, W) to (N, C, D, H, W)."""
    return images.reshape(n, images.shape[0] // n, *images.shape[1:]).permute(0, 2, 1, 3, 4)


def _padded_frames(x: Tensor, pads: tuple[int, int]) -> Tensor:
    """Permute (N, C, D, H, W) to (N, D, C, H, W) and add frames of zeros before and after."""
    frames = x.permute(0, 2, 1, 3, 4)
    if not any(pads):
        return frames
    if x.shape[0] != 1:
        return frames.pad([(0, 0), pads, (0, 0), (0, 0), (0, 0)])
    images = frames.reshape(*frames.shape[1:]).pad([pads, (0, 0), (0, 0), (0, 0)])  # as images, which plans store
    return images.reshape(1, *images.shape)


def conv_volume(
    node: OnnxNode,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    strides: list[int],
    dilations: list[int],
    pads: Pads,
) -> Tensor:
    """Compute a three-dimensional convolution of x (N, C, D, H, W) with filters (O, C / groups, kd, kh, kw).

    The frames that the taps in depth read are joined along channels, and one convolution of images reads all of them.
    """
    (top, bottom), (left, right) = pads[1:]
    padding = (top, left) if (top, left) == (bottom, right) else (top, left, bottom, right)
    stride, dilation, groups = (strides[1], strides[2]), (dilations[1], dilations[2]), node.get("group", 1)
    taps = _slices_of_taps(_padded_frames(x, pads[0]), weight.shape[2], strides[0], dilations[0])
    if groups == 1 and len(taps) > 1:
        filters = weight.permute(0, 2, 1, 3, 4).reshape(weight.shape[0], -1, *weight.shape[3:])
        return _as_volume(F.conv2d(cat(taps, 1), filters, bias, stride, padding, 1, dilation=dilation), x.shape[0])

    def plane(tap: int) -> Tensor:
        shift = bias if tap == 0 else None  # once, not for every tap
        return F.conv2d(taps[tap], weight[:, :, tap], shift, stride, padding, groups, dilation=dilation)

    return _as_volume(reduce(lambda a, b: a + b, map(plane, range(len(taps)))), x.shape[0])


def pool_volume(node: OnnxNode, x: Tensor, kernel: list[int], strides: list[int], pads: Pads) -> Tensor:
    """Compute the maximum or mean of windows of (N, C, D, H, W); a mean over padding is not supported."""
    average = node.op == "AveragePool"
    if average and any(map(any, pads)):
        raise UnavailableError(f"{node} averages volumes with padding, which tilewise does not compute")
    volume = x.pad([(0, 0), (0, 0), *pads], -math.inf) if any(map(any, pads)) else x
    pool = F.avg_pool2d if average else F.max_pool2d

    taps = _slices_of_taps(volume.permute(0, 2, 1, 3, 4), kernel[0], strides[0], 1)
    planes = [pool(images, (kernel[1], kernel[2]), (strides[1], strides[2]), (0, 0)) for images in taps]
    if average:
        return _as_volume(reduce(lambda a, b: a + b, planes), x.shape[0]) / float(kernel[0])
    return _as_volume(reduce(lambda a, b: a.maximum(b), planes), x.shape[0])
