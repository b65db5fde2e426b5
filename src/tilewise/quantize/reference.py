"""The integer layer in NumPy: what runs without the compiled kernels, and what they are tested against.

The same interface as the native Int8Layer and, bit for bit, the same results.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Pair = tuple[int, int]


class NumpyInt8Layer:
    """weights (O, kh, kw, C) int8; result = (sum + offset) * scale, rounded to bytes or kept as float."""

    def __init__(
        self, weights: Array, offset: Array, scale: Array | None, bias: Array | None, stride: Pair, padding: Pair
    ) -> None:
        self._weights, self._offset, self._scale, self._bias = weights, offset, scale, bias
        self._stride, self._padding = stride, padding
        self._zero, self._low, self._high, self._residual = 0, 0, 255, (0.0, 0)

    def set_output(self, zero: int, low: int, high: int) -> None:
        self._zero, self._low, self._high = zero, low, high

    def set_residual(self, scale: float, zero: int) -> None:
        self._residual = (scale, zero)

    def conv(self, x: Array, border: int, residual: Array | None, residual_border: int, out_border: int) -> Array:
        sums = self._sums(x, border)  # (N, H, W, O)
        assert self._scale is not None
        value = sums.astype(np.float32) * self._scale
        n, h, w, filters = sums.shape
        if residual is not None:
            b, (scale, zero) = residual_border, self._residual
            skip = residual[:, b : b + h, b : b + w, :filters].astype(np.int32) - zero
            value = value + skip.astype(np.float32) * np.float32(scale)
        out = np.full((n, h + 2 * out_border, w + 2 * out_border, -(-filters // 4) * 4), self._zero, np.uint8)
        out[:, out_border : out_border + h, out_border : out_border + w, :filters] = self._bytes(value)
        return out

    def linear(self, x: Array, kind: int, row_scale: Array | None, relu: bool) -> Array:
        outputs, channels = self._weights.shape[0], self._weights.shape[3]
        sums = x[:, :channels].astype(np.int32) @ self._weights.reshape(outputs, channels).T.astype(np.int32)
        sums = sums + self._offset
        if kind == 0:
            return sums.astype(np.int32)
        assert self._scale is not None
        value: Array = sums.astype(np.float32) * self._scale
        if kind == 2:
            out = np.full((len(x), -(-outputs // 4) * 4), self._zero, np.uint8)
            out[:, :outputs] = self._bytes(value)
            return out
        if row_scale is not None:
            value = value * row_scale[:, None]
        if self._bias is not None:
            value = value + self._bias
        return np.maximum(value, 0) if relu else value

    def weights(self) -> Array:
        return self._weights

    @property
    def nbytes(self) -> int:
        arrays = (self._weights, self._offset, self._scale, self._bias)
        return sum(a.nbytes for a in arrays if a is not None)

    def _sums(self, x: Array, border: int) -> Array:
        _, kh, kw, channels = self._weights.shape
        ph, pw = self._padding
        rows = slice(border - ph, x.shape[1] - (border - ph))
        columns = slice(border - pw, x.shape[2] - (border - pw))
        x = x[:, rows, columns, :channels].astype(np.int32)
        windows = np.lib.stride_tricks.sliding_window_view(x, (kh, kw), (1, 2))  # (N, H, W, C, kh, kw)
        windows = windows[:, :: self._stride[0], :: self._stride[1]]
        n, h, w = windows.shape[:3]
        columns_of = windows.transpose(0, 1, 2, 4, 5, 3).reshape(n * h * w, kh * kw * channels)
        flat = self._weights.reshape(len(self._weights), -1).T.astype(np.int32)
        sums: Array = (columns_of @ flat).reshape(n, h, w, len(self._weights)) + self._offset
        return sums

    def _bytes(self, value: Array) -> Array:
        clipped = np.clip(value, np.float32(self._low - self._zero), np.float32(self._high - self._zero))
        rounded: Array = np.rint(clipped).astype(np.int32) + self._zero
        return rounded.astype(np.uint8)
