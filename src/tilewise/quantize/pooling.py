"""Integer steps without weights: pooling, the mean of each channel, flattening. Bytes in, bytes out.

Each is called on a QuantizedArray like the layers with weights, and knows how to `add_to` a native plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise.quantize.array import QuantizedArray, round_up
from tilewise.quantize.parameters import AffineParameters

Array = npt.NDArray[Any]
Pair = tuple[int, int]


@dataclass(frozen=True)
class Pool:
    """What both kinds of pooling know."""

    kernel: Pair
    stride: Pair
    padding: Pair
    out_border: int = 0


class MaxPool(Pool):
    """The largest byte of each window: the largest number, since the scale is the same."""

    def __call__(self, x: QuantizedArray) -> QuantizedArray:
        if native is None:
            windows = _windows(x, self, 0).max((4, 5))
            return QuantizedArray(windows, x.parameters, x.channels).with_border(self.out_border)
        return _pooled(native.int8_max_pool, x, self)

    def add_to(self, plan: Any, inputs: list[int]) -> int:
        return int(plan.max_pool(inputs[0], self.kernel, self.stride, self.padding, self.out_border))


class AvgPool(Pool):
    """The mean of each window, padding counted as zeros, rounded to the input's own steps."""

    def __call__(self, x: QuantizedArray) -> QuantizedArray:
        if native is None:
            sums = _windows(x, self, x.parameters.zero_point).astype(np.int32).sum((4, 5))
            mean = np.rint(sums / (self.kernel[0] * self.kernel[1])).astype(np.uint8)
            return QuantizedArray(mean, x.parameters, x.channels).with_border(self.out_border)
        return _pooled(native.int8_avg_pool, x, self)

    def add_to(self, plan: Any, inputs: list[int]) -> int:
        return int(plan.avg_pool(inputs[0], self.kernel, self.stride, self.padding, self.out_border))


def _pooled(kernel: Any, x: QuantizedArray, pool: Pool) -> QuantizedArray:
    zero = x.parameters.zero_point
    data = kernel(x.data, x.border, pool.kernel, pool.stride, pool.padding, pool.out_border, zero)
    return QuantizedArray(data, x.parameters, x.channels, pool.out_border)


def _windows(x: QuantizedArray, pool: Pool, fill: int) -> Array:
    (ph, pw), inside = pool.padding, x.inside()
    inside = np.pad(inside, ((0, 0), (ph, ph), (pw, pw), (0, 0)), constant_values=fill)
    windows = np.lib.stride_tricks.sliding_window_view(inside, pool.kernel, (1, 2))  # (N, H, W, C, kh, kw)
    strided: Array = windows[:, :: pool.stride[0], :: pool.stride[1]]
    return strided


@dataclass(frozen=True)
class GlobalPool:
    """The mean of each channel, rounded to the steps of `output`."""

    input: AffineParameters
    output: AffineParameters

    def __call__(self, x: QuantizedArray) -> QuantizedArray:
        p, out = x.parameters, self.output
        if native is not None:
            q = native.int8_global_pool(x.data, x.border, x.channels, p.scale, p.zero_point, out.scale, out.zero_point)
            return QuantizedArray(q, out, x.channels)
        _, _, h, w = x.shape
        sums = x.inside().sum((1, 2), dtype=np.int32)
        mean = (sums.astype(np.float32) / np.float32(h * w) - np.float32(p.zero_point)) * np.float32(p.scale)
        q = out.quantize(mean)
        q[:, x.channels :] = out.zero_point
        return QuantizedArray(q, out, x.channels)

    def add_to(self, plan: Any, inputs: list[int]) -> int:
        return int(plan.global_pool(inputs[0], self.input.scale, self.output.scale, self.output.zero_point))


class Flatten:
    """(N, C, H, W) to (N, H W C): the order the bytes lie in, and the next layer's weights were put into."""

    def __call__(self, x: QuantizedArray) -> QuantizedArray:
        if x.data.ndim == 2:
            return x
        pixels = np.ascontiguousarray(x.inside()[..., : x.channels])
        rows = pixels.reshape(len(pixels), math.prod(pixels.shape[1:]))
        width = rows.shape[1]
        if width % 4:
            rows = np.pad(rows, ((0, 0), (0, round_up(width) - width)), constant_values=x.parameters.zero_point)
        return QuantizedArray(rows, x.parameters, width, image=x.shape[1:])

    def add_to(self, plan: Any, inputs: list[int]) -> int:
        return int(plan.flatten(inputs[0]))
