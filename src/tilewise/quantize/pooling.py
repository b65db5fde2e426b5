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
from tilewise.quantize.array import QuantizedArray, as_image, round_up
from tilewise.quantize.parameters import AffineParameters

Array = npt.NDArray[Any]
Pair = tuple[int, int]


@dataclass(frozen=True)
class Pool:
    """What both kinds of pooling know. Padding: top, left, bottom, right, or the same on both sides."""

    kernel: Pair
    stride: Pair
    padding: tuple[int, ...]
    out_border: int = 0
    count_padding: bool = True

    @property
    def sides(self) -> tuple[int, ...]:
        return (*self.padding, *self.padding)[:4]

    @property
    def is_even(self) -> bool:
        return self.sides[:2] == self.sides[2:] and self.count_padding


class MaxPool(Pool):
    """The largest byte of each window: the largest number, since the scale is the same."""

    def __call__(self, x: QuantizedArray) -> QuantizedArray:
        if native is None or not self.is_even or x.parameters.is_int16:
            windows = _windows(x, self, x.parameters.limits[0]).max((4, 5))
            return QuantizedArray(windows, x.parameters, x.channels).with_border(self.out_border)
        return _pooled(native.int8_max_pool, x, self)

    def add_to(self, plan: Any, inputs: list[int], parameters: list[AffineParameters]) -> int:
        return int(plan.pool(inputs[0], self.kernel, self.stride, self.sides, False, True, self.out_border))


class AvgPool(Pool):
    """The mean of each window, padding counted as zeros or not at all, rounded to the input's own steps."""

    def __call__(self, x: QuantizedArray) -> QuantizedArray:
        if native is None or not self.is_even or x.parameters.is_int16:
            zero = x.parameters.zero_point if self.count_padding else 0
            sums = _windows(x, self, zero).astype(np.int32).sum((4, 5))
            exact = np.float32 if x.parameters.is_int16 else np.float64  # as the compiled kernels divide
            mean = np.rint(sums.astype(exact) / np.asarray(self._cells(x), exact)).astype(x.data.dtype)
            return QuantizedArray(mean, x.parameters, x.channels).with_border(self.out_border)
        return _pooled(native.int8_avg_pool, x, self)

    def _cells(self, x: QuantizedArray) -> Array | int:
        if self.count_padding:
            return self.kernel[0] * self.kernel[1]
        ones = QuantizedArray(np.ones_like(x.inside()), x.parameters, x.channels)
        cells: Array = _windows(ones, self, 0).sum((4, 5), dtype=np.int32)
        return cells

    def add_to(self, plan: Any, inputs: list[int], parameters: list[AffineParameters]) -> int:
        window = (self.kernel, self.stride, self.sides)
        return int(plan.pool(inputs[0], *window, True, self.count_padding, self.out_border))


def _pooled(kernel: Any, x: QuantizedArray, pool: Pool) -> QuantizedArray:
    zero = x.parameters.zero_point
    data = kernel(x.data, x.border, pool.kernel, pool.stride, pool.sides[:2], pool.out_border, zero)
    return QuantizedArray(data, x.parameters, x.channels, pool.out_border)


def _windows(x: QuantizedArray, pool: Pool, fill: int) -> Array:
    (top, left, bottom, right), inside = pool.sides, x.inside()
    inside = np.pad(inside, ((0, 0), (top, bottom), (left, right), (0, 0)), constant_values=fill)
    windows = np.lib.stride_tricks.sliding_window_view(inside, pool.kernel, (1, 2))  # (N, H, W, C, kh, kw)
    strided: Array = windows[:, :: pool.stride[0], :: pool.stride[1]]
    return strided


@dataclass(frozen=True)
class GlobalPool:
    """The mean of each channel, rounded to the steps of `output`."""

    input: AffineParameters
    output: AffineParameters
    rows: bool = True
    out_border: int = 0

    def __call__(self, x: QuantizedArray) -> QuantizedArray:
        rows = self._mean(x)
        return rows if self.rows else as_image(rows).with_border(self.out_border)

    def _mean(self, x: QuantizedArray) -> QuantizedArray:
        p, out = x.parameters, self.output
        if native is not None and not (p.is_int16 or out.is_int16):
            q = native.int8_global_pool(x.data, x.border, x.channels, p.scale, p.zero_point, out.scale, out.zero_point)
            return QuantizedArray(q, out, x.channels)
        _, _, h, w = x.shape
        sums = x.inside().sum((1, 2), dtype=np.int64)
        mean = (sums.astype(np.float32) / np.float32(h * w) - np.float32(p.zero_point)) * np.float32(p.scale)
        q = out.quantize(mean)
        q[:, x.channels :] = out.zero_point
        return QuantizedArray(q, out, x.channels)

    def add_to(self, plan: Any, inputs: list[int], _parameters: list[AffineParameters]) -> int:
        out = self.output
        scales = (self.input.scale, out.scale, out.zero_point, out.most)
        return int(plan.global_mean(inputs[0], *scales, self.rows, self.out_border))


@dataclass(frozen=True)
class QuantizedFlatten:
    """(N, C, H, W) to rows (N, C H W).

    Images are stored with channels last. `image` is the (C, H, W) being flattened. With `keeps_channels_last` the row
    keeps the stored order (H, W, C), which costs nothing, and whoever reads it must know; otherwise the row is
    reordered to the module's (C, H, W).
    """

    image: tuple[int, ...] = ()  # () if the input is a row already
    keeps_channels_last: bool = False

    def __call__(self, x: QuantizedArray) -> QuantizedArray:
        if x.data.ndim == 2:
            return x
        pixels = x.inside()[..., : x.channels]  # (N, H, W, C)
        if not self.keeps_channels_last:
            pixels = pixels.transpose(0, 3, 1, 2)
        rows = np.ascontiguousarray(pixels).reshape(len(pixels), math.prod(pixels.shape[1:]))
        width = rows.shape[1]
        if width % 4:
            rows = np.pad(rows, ((0, 0), (0, round_up(width) - width)), constant_values=x.parameters.zero_point)
        return QuantizedArray(rows, x.parameters, width, image=x.shape[1:] if self.keeps_channels_last else ())

    def add_to(self, plan: Any, inputs: list[int], _parameters: list[AffineParameters]) -> int:
        return int(plan.flatten(inputs[0], not self.keeps_channels_last))
