"""Activations between integer layers: NHWC, each image padded with its zero point.

The padding is that of the convolutions that read the image, so they never test for the edge. Channels are
rounded up to a multiple of four, the width of one int8 dot product instruction.
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
    """Round up to a multiple of four channels."""
    return -(-n // 4) * 4


@dataclass(frozen=True)
class QuantizedArray:
    """Integers with their quantization parameters.

    `data` is (N, H + 2 padding, W + 2 padding, C') for images and (N, K') for rows, uint8 or int16, of which `channels`
    are valid. A row that was an image stores its (C, H, W) in `image`; its values are in the order (H, W, C).
    """

    data: Array
    parameters: AffineParameters
    channels: int
    padding: int = 0
    image: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the float array: (N, C, H, W) or (N, K)."""
        if self.data.ndim == 2:
            return (self.data.shape[0], self.channels)
        n, h, w, _ = self.data.shape
        return (n, self.channels, h - 2 * self.padding, w - 2 * self.padding)

    def inside(self) -> Array:
        """Return the image without its padding: (N, H, W, C')."""
        p = self.padding
        return self.data[:, p : self.data.shape[1] - p, p : self.data.shape[2] - p] if p else self.data

    def dequantize(self) -> Array:
        """Convert to float32, channels first."""
        if self.data.ndim == 2:
            rows = self.data[:, : self.channels]
            if self.image:  # stored as (H, W, C), returned as (C, H, W)
                c, h, w = self.image
                rows = rows.reshape(-1, h, w, c).transpose(0, 3, 1, 2).reshape(rows.shape)
            return self.parameters.dequantize(rows)
        image = self.inside()[..., : self.channels]
        return np.ascontiguousarray(self.parameters.dequantize(image).transpose(0, 3, 1, 2))

    def with_padding(self, padding: int) -> QuantizedArray:
        """Return the image with a padding of at least `padding`."""
        if self.padding >= padding:
            return self
        inside = self.inside()
        n, h, w, c = inside.shape
        data = np.full((n, h + 2 * padding, w + 2 * padding, c), self.parameters.zero_point, inside.dtype)
        data[:, padding : padding + h, padding : padding + w] = inside
        return QuantizedArray(data, self.parameters, self.channels, padding)


def as_image(x: QuantizedArray) -> QuantizedArray:
    """Reshape rows to images of one pixel; return images unchanged."""
    if x.data.ndim == 4:
        return x
    return QuantizedArray(x.data.reshape(len(x.data), 1, 1, -1), x.parameters, x.channels)


def image_values(x: QuantizedArray) -> Array:
    """Return the values (N, H, W, C) without padding and without the channels that fill up a multiple of four."""
    return as_image(x).inside()[..., : x.channels]


def quantize_array(x: Array, parameters: AffineParameters, padding: int = 0) -> QuantizedArray:
    """Quantize float32 values (N, C, H, W) or (N, K)."""
    x = np.ascontiguousarray(x, np.float32)
    # Compiled kernels convert to uint8 only; int16 activations are made inside native plans.
    if native is None or parameters.is_int16:
        data = _quantize_numpy(x, parameters, padding)
    elif x.ndim == 4:
        data = native.int8_quantize_images(x, parameters.scale, parameters.zero_point, padding)
    else:
        data = native.int8_quantize(x, parameters.scale, parameters.zero_point)
    return QuantizedArray(data, parameters, x.shape[1], padding)


def _quantize_numpy(x: Array, parameters: AffineParameters, padding: int) -> Array:
    """Quantize with NumPy into padded storage: (N, K') or (N, H + 2 padding, W + 2 padding, C')."""
    q, zero = parameters.quantize(x), parameters.zero_point
    if x.ndim == 2:
        out = np.full((len(q), round_up(q.shape[1])), zero, q.dtype)
        out[:, : q.shape[1]] = q
        return out
    # (N, C, H, W) to (N, H, W, C): the padding and the channels that fill up a multiple of four hold the zero point.
    n, c, h, w = q.shape
    out = np.full((n, h + 2 * padding, w + 2 * padding, round_up(c)), zero, q.dtype)
    out[:, padding : padding + h, padding : padding + w, :c] = q.transpose(0, 2, 3, 1)
    return out
