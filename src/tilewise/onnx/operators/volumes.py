"""Convolutions and pools of volumes (N, C, D, H, W): sums or maxima of two-dimensional ones over the taps in depth."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce

from tilewise.errors import UnavailableError
from tilewise.nn import functional as F
from tilewise.onnx.graph import OnnxNode
from tilewise.onnx.operators.base import room
from tilewise.tensor import Tensor

Pads = list[tuple[int, int]]


def _over_depth(
    x: Tensor,
    steps: tuple[int, int, int],
    plane: Callable[[Tensor, int], Tensor],
    join: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Apply `plane(images, tap)` to the slices that each tap reads, and join the results of all taps.

    `steps` are the number of taps in depth, the stride and the dilation.
    """
    taps, stride, dilation = steps
    n, c, depth, h, w = x.shape
    slices = (depth - (taps - 1) * dilation - 1) // stride + 1
    room([n, slices, c, h, w])
    results = []
    for tap in range(taps):
        first = tap * dilation
        part = x[:, :, first : first + (slices - 1) * stride + 1 : stride]  # (N, C, slices, H, W)
        images = part.permute(0, 2, 1, 3, 4).reshape(n * slices, c, h, w)
        results.append(plane(images, tap))
    y = reduce(join, results)
    return y.reshape(n, slices, *y.shape[1:]).permute(0, 2, 1, 3, 4)


def _padded_depth(x: Tensor, pads: tuple[int, int], value: float) -> Tensor:
    return x.pad([(0, 0), (0, 0), pads, (0, 0), (0, 0)], value) if any(pads) else x


def conv_volume(
    node: OnnxNode, x: Tensor, weight: Tensor, bias: Tensor | None, strides: list[int], dilations: list[int], pads: Pads
) -> Tensor:
    """Return a three-dimensional convolution with filters (O, C / groups, kd, kh, kw)."""
    (top, bottom), (left, right) = pads[1:]
    padding = (top, left) if (top, left) == (bottom, right) else (top, left, bottom, right)

    def plane(images: Tensor, tap: int) -> Tensor:
        shift = bias if tap == 0 else None  # once, not for every tap
        stride, dilation = (strides[1], strides[2]), (dilations[1], dilations[2])
        return F.conv2d(images, weight[:, :, tap], shift, stride, padding, node.get("group", 1), dilation=dilation)

    volume = _padded_depth(x, pads[0], 0.0)
    return _over_depth(volume, (weight.shape[2], strides[0], dilations[0]), plane, lambda a, b: a + b)


def pool_volume(node: OnnxNode, x: Tensor, kernel: list[int], strides: list[int], pads: Pads) -> Tensor:
    """Return the maximum or mean of windows of a volume; a mean over padding is not supported."""
    average = node.op == "AveragePool"
    if average and any(map(any, pads)):
        raise UnavailableError(f"{node} averages volumes with padding, which tilewise does not compute")
    volume = x.pad([(0, 0), (0, 0), *pads], -math.inf) if any(map(any, pads)) else x
    pool = F.avg_pool2d if average else F.max_pool2d

    def plane(images: Tensor, _tap: int) -> Tensor:
        return pool(images, (kernel[1], kernel[2]), (strides[1], strides[2]), (0, 0))

    if average:
        return _over_depth(volume, (kernel[0], strides[0], 1), plane, lambda a, b: a + b) / float(kernel[0])
    return _over_depth(volume, (kernel[0], strides[0], 1), plane, lambda a, b: a.maximum(b))
