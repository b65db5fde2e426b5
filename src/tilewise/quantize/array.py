"""Activations between integer layers: bytes, channels last, with a frame of zero points around each image.

The frame is as wide as the padding of the convolutions that will read it, so they never test for the edge. Channels are
rounded up to a multiple of four, what one dot instruction takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise.quantize.parameters import AffineParameters

Array = npt.NDArray[Any]


def round_up(n: int) -> int:
    return -(-n // 4) * 4


@dataclass(frozen=True)
class QuantizedArray:
    """`data` is (N, H + 2 border, W + 2 border, C') uint8 for images, (N, K') for rows, or int16 where the parameters
    are wide; `channels` of them count. Rows that were an image remember its (C, H, W): their bytes lie in the order
    (H, W, C)."""

    data: Array
    parameters: AffineParameters
    channels: int
    border: int = 0
    image: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """As a float array would have it: (N, C, H, W) or (N, K)."""
        if self.data.ndim == 2:
            return (self.data.shape[0], self.channels)
        n, h, w, _ = self.data.shape
        return (n, self.channels, h - 2 * self.border, w - 2 * self.border)

    def inside(self) -> Array:
        """The image without its frame: (N, H, W, C')."""
        b = self.border
        return self.data[:, b : self.data.shape[1] - b, b : self.data.shape[2] - b] if b else self.data

    def dequantize(self) -> Array:
        """float32, channels first."""
        if self.data.ndim == 2:
            rows = self.data[:, : self.channels]
            if self.image:
                c, h, w = self.image
                rows = rows.reshape(-1, h, w, c).transpose(0, 3, 1, 2).reshape(rows.shape)
            return self.parameters.dequantize(rows)
        pixels = self.inside()[..., : self.channels]
        return np.ascontiguousarray(self.parameters.dequantize(pixels).transpose(0, 3, 1, 2))

    def with_border(self, border: int) -> QuantizedArray:
        """The same image in a frame at least `border` wide."""
        if self.border >= border:
            return self
        inside = self.inside()
        n, h, w, c = inside.shape
        data = np.full((n, h + 2 * border, w + 2 * border, c), self.parameters.zero_point, inside.dtype)
        data[:, border : border + h, border : border + w] = inside
        return QuantizedArray(data, self.parameters, self.channels, border)


def as_image(x: QuantizedArray) -> QuantizedArray:
    """Rows as images of one pixel; images as they are."""
    if x.data.ndim == 4:
        return x
    return QuantizedArray(x.data.reshape(len(x.data), 1, 1, -1), x.parameters, x.channels)


def pixels_of(x: QuantizedArray) -> Array:
    """(N, H, W, C): without the frame and without padding channels."""
    return as_image(x).inside()[..., : x.channels]


def quantize_array(x: Array, parameters: AffineParameters, border: int = 0) -> QuantizedArray:
    """float32 (N, C, H, W) or (N, K) to bytes."""
    x = np.ascontiguousarray(x, np.float32)
    if native is None or parameters.wide:
        data = _quantize_numpy(x, parameters, border)
    elif x.ndim == 4:
        data = native.int8_quantize_images(x, parameters.scale, parameters.zero_point, border)
    else:
        data = native.int8_quantize(x, parameters.scale, parameters.zero_point)
    return QuantizedArray(data, parameters, x.shape[1], border)


def _quantize_numpy(x: Array, parameters: AffineParameters, border: int) -> Array:
    q, zero = parameters.quantize(x), parameters.zero_point
    if x.ndim == 2:
        out = np.full((len(q), round_up(q.shape[1])), zero, q.dtype)
        out[:, : q.shape[1]] = q
        return out
    n, c, h, w = q.shape
    out = np.full((n, h + 2 * border, w + 2 * border, round_up(c)), zero, q.dtype)
    out[:, border : border + h, border : border + w, :c] = q.transpose(0, 2, 3, 1)
    return out
