"""Real numbers as 8-bit integers: a scale, a zero point, and the rounding between.

Weights are symmetric int8 (zero point 0), with one scale per output channel or one for all. Activations are affine
uint8: real = (q - zero_point) * scale, with 0.0 exactly representable, because padding and ReLU need it. Where uint8
is too coarse, an activation is int16 (`tilewise.quantize.mixed_precision`): real = q * scale, and the layers that
read it have int16 weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewise._extension import native
from tilewise.backend.instance_methods import ExplainsMethods
from tilewise.errors import ConfigurationError, DtypeError, ShapeError, as_array, type_name
from tilewise.tensor import Array

INT16_MAX = 32767  # largest magnitude of an int16 activation
MIN_INT16_LIMIT = 4095  # smallest limit of int16 activations, even if sums of thousands of products read them
# 2**24 times the smallest normal float32 number: products and quotients with 24-bit integers stay normal.
_SMALLEST_SCALE = float(np.finfo(np.float32).tiny) * 2**24


@dataclass(frozen=True)
class AffineParameters:
    """Parameters of quantized activations: real = (q - zero_point) * scale.

    Activations are uint8, or int16 with zero point 0 and magnitudes up to `int16_limit`.
    """

    scale: float
    zero_point: int
    int16_limit: int = 0  # 0 for uint8

    @property
    def is_int16(self) -> bool:
        return self.int16_limit > 0

    @property
    def limits(self) -> tuple[int, int]:
        """Smallest and largest quantized integer."""
        return (-self.int16_limit, self.int16_limit) if self.is_int16 else (0, 255)

    @property
    def largest(self) -> int:
        """Largest magnitude that a kernel multiplies."""
        return self.limits[1]

    def quantize(self, x: Array) -> Array:
        """Round floats to integers; NaN becomes the zero point, values out of range saturate."""
        # Clip before rounding: large floats do not fit into int32.
        low, high = self.limits
        scaled = np.nan_to_num(np.asarray(x, np.float32) * np.float32(1 / np.float32(self.scale)), nan=0.0)
        clipped = np.clip(scaled, low - self.zero_point, high - self.zero_point)
        rounded: Array = np.rint(clipped).astype(np.int32) + self.zero_point
        return rounded.astype(np.int16 if self.is_int16 else np.uint8)

    def to_int16(self, margin: float, limit: int) -> AffineParameters:
        """Return int16 parameters in which `limit` stands for `margin` times the largest magnitude."""
        largest = margin * max(self.zero_point, 255 - self.zero_point)
        return self if self.is_int16 else AffineParameters(_float32(self.scale * largest / limit), 0, limit)

    def to_exact_int16(self) -> AffineParameters:
        """Return int16 parameters with the same scale, for uint8 values less their zero point."""
        return self if self.is_int16 else AffineParameters(self.scale, 0, 255)

    def dequantize(self, q: Array) -> Array:
        """Convert integers to float32."""
        real: Array = (q.astype(np.int32) - self.zero_point).astype(np.float32) * np.float32(self.scale)
        return real


def _float32(scale: float) -> float:
    """Round a scale to float32, but not below the smallest scale that the kernels accept."""
    return float(np.float32(max(scale, _SMALLEST_SCALE)))


def affine_from_range(low: float, high: float) -> AffineParameters:
    """Return the uint8 parameters whose 256 steps cover [low, high] and 0."""
    if not (np.isfinite(low) and np.isfinite(high)):
        raise ConfigurationError(f"a range from {low} to {high} cannot be quantized")
    low, high = min(low, 0.0), max(high, 0.0)
    if low == high:  # only zeros were observed: any scale represents them
        high = 1.0
    scale = _float32((high - low) / 255)
    return AffineParameters(scale, round(min(max(-low / scale, 0), 255)))


@dataclass(frozen=True)
class QuantizedWeights:
    """int8 weights `q`, their `scale` (per output channel, or one) and `zero_point` (0: symmetric).

    `input` holds the affine parameters of the layer's input if there was calibration data.
    """

    q: Array
    scale: Array
    zero_point: Array
    input: AffineParameters | None = None

    def dequantize(self) -> Array:
        return self.q.astype(np.float32) * broadcast_scale(self.scale, self.q.ndim)

    @property
    def nbytes(self) -> int:
        return int(self.q.nbytes + self.scale.nbytes + self.zero_point.nbytes)


def broadcast_scale(scale: Array, ndim: int) -> Array:
    """Reshape scales per output channel to multiply an array of `ndim` dimensions along its first axis."""
    return scale.reshape(-1, *([1] * (ndim - 1))) if scale.size > 1 else scale.reshape(())


class INT8Quantizer(metaclass=ExplainsMethods):
    """Quantizes float weights to int8.

    >>> weights = np.array([[0.5, -1.0], [2.0, 0.25]], np.float32)
    >>> INT8Quantizer().quantize_weights(weights).q
    array([[  64, -127],
           [ 127,   16]], dtype=int8)
    """

    def __init__(self, per_channel: bool = True) -> None:
        self.per_channel = per_channel

    def quantize_weights(self, weights: Any, calibration_data: Any = None) -> QuantizedWeights:
        """Quantize weights (O, ...) to int8; calibration inputs (an array or batches) give `.input`, their range."""
        w = checked_weights(weights)
        axes = tuple(range(1, w.ndim)) if self.per_channel else None
        result = rounded_weights(w, np.atleast_1d(np.abs(w).max(axes)), 127)
        return result if calibration_data is None else replace(result, input=_input_parameters(calibration_data))

    def dequantize(self, weights: QuantizedWeights) -> Array:
        """Convert quantized weights back to float32."""
        if not isinstance(weights, QuantizedWeights):
            raise ConfigurationError(f"dequantize takes what quantize_weights returned, not a {type_name(weights)}")
        return weights.dequantize()


def checked_weights(weights: Any) -> Array:
    """Return weights as a non-empty array of finite floats, or raise an error."""
    if hasattr(weights, "named_modules"):
        raise DtypeError(
            f"a {type_name(weights)} is not an array of weights; pass layer.weight, or use quantize(model, "
            "calibration_dataset) for a whole model"
        )
    w: Array = as_array(weights)
    if w.dtype.kind != "f":
        kind = type_name(weights) if w.dtype.kind in "OU" else w.dtype
        raise DtypeError(f"weights must be an array of floating-point numbers, not {kind}")
    if w.ndim == 0 or w.size == 0:
        raise ShapeError(f"weights of shape {w.shape} cannot be quantized: they have no elements")
    if not np.isfinite(w).all():
        raise ConfigurationError("the weights hold NaN or infinity, which have no int8 form")
    return w


def rounded_weights(w: Array, largest: Array, limit: int) -> QuantizedWeights:
    """Round weights to the nearest int8, with scales (per channel or one) that map `largest` to `limit`."""
    # Channels of zeros get scale 1; any scale represents them.
    steps = largest.astype(np.float64) / limit
    scale = np.where(largest > 0, np.maximum(steps, _SMALLEST_SCALE), 1.0).astype(np.float32)
    q = np.clip(np.rint(w / broadcast_scale(scale, w.ndim)), -127, 127).astype(np.int8)
    return QuantizedWeights(q, scale, np.zeros(scale.shape, np.int32))


def int16_weights(weights: Array, bias: Array | None, input: AffineParameters) -> QuantizedWeights:
    """Round weights (O, ...) to int16, with the smallest scales that keep any sum with int16 inputs within 32 bits."""
    w = checked_weights(weights)
    rows = np.abs(w.reshape(len(w), -1).astype(np.float64))
    # Each weight, and the bias, may be rounded up by a half.
    margin = 2**31 - 2 - input.largest * (rows.shape[1] + 1)
    if margin < 2**30:
        raise ConfigurationError("it has so many inputs that a sum of them might not fit into 32 bits")
    # The scale is the larger one of those that the sum and a single int16 weight need.
    worst = rows.sum(1) * input.largest + (0.0 if bias is None else np.abs(bias) / input.scale)
    finest = np.maximum(worst / margin, rows.max(1, initial=0) / 32767)
    scale = np.where(finest > 0, np.maximum(finest * (1 + 1e-6), _SMALLEST_SCALE), 1.0).astype(np.float32)
    q = np.clip(np.rint(w / broadcast_scale(scale, w.ndim)), -32767, 32767).astype(np.int16)
    return QuantizedWeights(q, scale, np.zeros(scale.shape, np.int32))


def _input_parameters(data: Any) -> AffineParameters:
    """Return the uint8 parameters that cover one array of inputs, or all batches of an iterable."""
    batches: Iterable[Any] = [data] if isinstance(data, np.ndarray) or hasattr(data, "requires_grad") else data
    low, high, count = np.inf, -np.inf, 0
    if not isinstance(batches, Iterable):
        raise ConfigurationError(f"calibration data is an array or batches of arrays, not {type_name(data)}")
    for batch in batches:
        x = as_array(batch)
        if x.dtype.kind not in "biuf":
            raise ConfigurationError(f"calibration data is an array or batches of arrays, not {type_name(data)}")
        if x.size:
            low, high, count = min(low, float(x.min())), max(high, float(x.max())), count + x.size
    if not count:
        raise ConfigurationError("there is no calibration data")
    return affine_from_range(low, high)


# --- activations between integer layers: NHWC, each image padded with its zero point ---

# The padding is that of the convolutions that read the image, so they never test for the edge. Channels are rounded up
# to a multiple of four, the width of one int8 dot product instruction.


def round_up(n: int) -> int:
    """Round a number of channels up to a multiple of four."""
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
        """Return a view of the image without its padding: (N, H, W, C')."""
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
        """Return the image with at least `padding` pixels of zero point on each side."""
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
    """Quantize float32 values (N, C, H, W) or (N, K) by `parameters`; images get `padding` pixels on each side."""
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
