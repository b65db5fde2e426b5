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
import numpy.typing as npt

from tilewise.errors import ConfigurationError, DtypeError, ShapeError

Array = npt.NDArray[Any]
WIDEST = 32767  # the largest size of a 16-bit activation
USUAL = 4095  # of one that sums of thousands of products may read
_SMALLEST_SCALE = float(np.finfo(np.float32).tiny) * 2**24


@dataclass(frozen=True)
class AffineParameters:
    """uint8 activations, or `wide` ones of 16 bits, whose zero point is 0 and whose size is at most `most`:
    real = (q - zero_point) * scale."""

    scale: float
    zero_point: int
    most: int = 0

    @property
    def is_int16(self) -> bool:
        return self.most > 0

    @property
    def limits(self) -> tuple[int, int]:
        """The smallest and the largest number."""
        return (-self.most, self.most) if self.is_int16 else (0, 255)

    @property
    def largest(self) -> int:
        """The largest size of a number that a product meets."""
        return self.limits[1]

    def quantize(self, x: Array) -> Array:
        """NaN becomes the zero point; what is out of range saturates."""
        low, high = self.limits
        scaled = np.nan_to_num(np.asarray(x, np.float32) * np.float32(1 / np.float32(self.scale)), nan=0.0)
        clipped = np.clip(scaled, low - self.zero_point, high - self.zero_point)
        rounded: Array = np.rint(clipped).astype(np.int32) + self.zero_point
        return rounded.astype(np.int16 if self.is_int16 else np.uint8)

    def widened(self, room: float, most: int) -> AffineParameters:
        """The same range in 16 bits, and `room` times as much, for what calibration did not see, in `most` steps."""
        size = room * max(self.zero_point, 255 - self.zero_point)
        return self if self.is_int16 else AffineParameters(_float32(self.scale * size / most), 0, most)

    def exactly_widened(self) -> AffineParameters:
        """Bytes less their zero point, as numbers of 16 bits."""
        return self if self.is_int16 else AffineParameters(self.scale, 0, 255)

    def dequantize(self, q: Array) -> Array:
        real: Array = (q.astype(np.int32) - self.zero_point).astype(np.float32) * np.float32(self.scale)
        return real


def _float32(scale: float) -> float:
    return float(np.float32(max(scale, _SMALLEST_SCALE)))


def affine_from_range(low: float, high: float) -> AffineParameters:
    """Parameters whose 256 steps cover [low, high] and 0."""
    if not (np.isfinite(low) and np.isfinite(high)):
        raise ConfigurationError(f"a range from {low} to {high} cannot be quantized")
    low, high = min(low, 0.0), max(high, 0.0)
    if low == high:  # nothing but zeros was seen: any scale represents them
        high = 1.0
    scale = float(np.float32(max((high - low) / 255, _SMALLEST_SCALE)))
    return AffineParameters(scale, round(min(max(-low / scale, 0), 255)))


@dataclass(frozen=True)
class QuantizedWeights:
    """int8 weights `q`, their `scale` (per output channel, or one) and `zero_point` (0: symmetric); and, where
    calibration data was given, the affine parameters of the layer's input."""

    q: Array
    scale: Array
    zero_point: Array
    input: AffineParameters | None = None

    def dequantize(self) -> Array:
        return self.q.astype(np.float32) * spread(self.scale, self.q.ndim)

    @property
    def nbytes(self) -> int:
        return int(self.q.nbytes + self.scale.nbytes + self.zero_point.nbytes)


def spread(scale: Array, ndim: int) -> Array:
    """Per-channel numbers shaped to multiply an array of `ndim` dimensions along its first."""
    return scale.reshape(-1, *([1] * (ndim - 1))) if scale.size > 1 else scale.reshape(())


class INT8Quantizer:
    """Turns float weights into int8.

    >>> weights = np.array([[0.5, -1.0], [2.0, 0.25]], np.float32)
    >>> INT8Quantizer().quantize_weights(weights).q
    array([[  64, -127],
           [ 127,   16]], dtype=int8)
    """

    def __init__(self, per_channel: bool = True) -> None:
        self.per_channel = per_channel

    def quantize_weights(self, weights: Any, calibration_data: Any = None) -> QuantizedWeights:
        """Weights with their output channels first; `calibration_data` is an array of inputs, or batches of them."""
        w = checked_weights(weights)
        axes = tuple(range(1, w.ndim)) if self.per_channel else None
        made = rounded_weights(w, np.atleast_1d(np.abs(w).max(axes)), 127)
        return made if calibration_data is None else replace(made, input=_input(calibration_data))

    def dequantize(self, weights: QuantizedWeights) -> Array:
        """Convert quantized weights back to float32."""
        return weights.dequantize()


def checked_weights(weights: Any) -> Array:
    """As an array of finite floats with something in it, or an error."""
    if hasattr(weights, "named_modules"):
        raise DtypeError(
            f"a {type(weights).__name__} is not an array of weights; pass layer.weight, or use quantize(model, "
            "calibration_dataset) for a whole model"
        )
    w = np.asarray(weights)
    if w.dtype.kind != "f":
        raise DtypeError(f"weights must be floating point, not {w.dtype}")
    if w.ndim == 0 or w.size == 0:
        raise ShapeError(f"weights of shape {w.shape} cannot be quantized: there is nothing in them")
    if not np.isfinite(w).all():
        raise ConfigurationError("the weights hold NaN or infinity, which have no int8 form")
    return w


def rounded_weights(w: Array, largest: Array, most: int) -> QuantizedWeights:
    """Weights by the scales that make `largest`, a number a channel or one for all, `most` steps."""
    steps = largest.astype(np.float64) / most
    scale = np.where(largest > 0, np.maximum(steps, _SMALLEST_SCALE), 1.0).astype(np.float32)
    q = np.clip(np.rint(w / spread(scale, w.ndim)), -127, 127).astype(np.int8)
    return QuantizedWeights(q, scale, np.zeros(scale.shape, np.int32))


def wide_weights(given: Array, bias: Array | None, input: AffineParameters) -> QuantizedWeights:
    """Weights (O, ...) of 16 bits for a wide input, as fine as their sums with any activations, and the bias, stay
    within 31 bits."""
    w = checked_weights(given)
    rows = np.abs(w.reshape(len(w), -1).astype(np.float64))
    room = (
        2**31 - 2 - input.largest * (rows.shape[1] + 1)
    )  # each may be rounded up by a half, and the bias take it back
    if room < 2**30:
        raise ConfigurationError("it has so many inputs that a sum of them might not fit into 32 bits")
    worst = rows.sum(1) * input.largest + (0.0 if bias is None else np.abs(bias) / input.scale)
    finest = np.maximum(worst / room, rows.max(1, initial=0) / 32767)
    scale = np.where(finest > 0, np.maximum(finest * (1 + 1e-6), _SMALLEST_SCALE), 1.0).astype(np.float32)
    q = np.clip(np.rint(w / spread(scale, w.ndim)), -32767, 32767).astype(np.int16)
    return QuantizedWeights(q, scale, np.zeros(scale.shape, np.int32))


def _input(data: Any) -> AffineParameters:
    batches: Iterable[Any] = [data] if isinstance(data, np.ndarray) or hasattr(data, "requires_grad") else data
    low, high, seen = np.inf, -np.inf, 0
    for batch in batches:
        x = np.asarray(batch)
        if x.size:
            low, high, seen = min(low, float(x.min())), max(high, float(x.max())), seen + x.size
    if not seen:
        raise ConfigurationError("there is no calibration data")
    return affine_from_range(low, high)
