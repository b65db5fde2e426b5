"""Integer layers in NumPy: the definition that compiled kernels equal to the last bit, and the path without them.

An output stage turns an accumulator into the stored integers: requantization, clamping and the activation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tilewise.graph.op_specs.functions import is_leaky, leaky_slope
from tilewise.tensor import Array

Pair = tuple[int, int]
Four = tuple[int, int, int, int]
F = np.float32


# zero point, low, high; lookup table, its grid points per unit, its first point; hard-swish: where its parabola ends (0
# for other activations) and its slope; SiLU: coefficients c0, c1, c2 of each segment, then shift and step
NativeUint8Stage = tuple[int, int, int, bytes, float, int, float, float, bytes]
_POINTS_PER_STEP = 16  # grid points of a lookup table per output step; fewer if _MAX_POINTS would be exceeded
_MAX_POINTS = 1 << 14  # bytes of a lookup table: half of a 32 KiB level-1 cache
# SiLU's approximation: parabolas on each side of 0, and the width of one. Beyond them SiLU is 0 or x.
_SEGMENTS, _SEGMENT_WIDTH = 8, 17 / 16
# Output scales for which the parabolas are off by at most a tenth of a step and 16 bits hold their coefficients.
_PIECEWISE_SCALES = 1 / 64, 64.0
_MAX_PIECEWISE_INPUT = 32700  # native/kernels/int8_elementwise.h: kMostInPieces


@dataclass(frozen=True)
class Uint8OutputStage:
    """Requantization to uint8: clamp(round(value) + zero, low, high), after the activation if there is one.

    SiLU equals ReLU less a difference that is symmetric around 0; the difference is a piecewise parabola in 16-bit
    integers. Other activations, and SiLU with very fine steps, are lookup tables: the value is rounded to a grid that
    is much finer than the output's steps. Left of the table an activation is close to 0 or below the output's range;
    right of it, it is above.
    """

    activation: str = ""
    inverse: float = 1.0  # 1 / scale of the output
    zero: int = 0
    low: int = 0
    high: int = 255

    @property
    def takes_real_values(self) -> bool:
        """Tell whether the stage reads real numbers, not multiples of the output's scale."""
        return bool(self.activation) and self.activation != "hard_swish" and not self.is_piecewise

    @property
    def is_piecewise(self) -> bool:
        """Tell whether the activation is approximated by a piecewise polynomial."""
        lowest, highest = _PIECEWISE_SCALES
        return self.activation == "silu" and lowest <= 1 / self.inverse <= highest and self.high == 255

    @property
    def units_per_step(self) -> float:
        """Resolution of the values that the stage reads, relative to the output's step."""
        return 32768 / self._shift_and_step()[1] if self.is_piecewise else 1.0

    def requantize(self, value: Array) -> Array:
        """Convert accumulators to stored integers."""
        return requantize(value, self.native())

    def native(self) -> NativeUint8Stage:
        """Return the stage as the tuple that compiled kernels take."""
        if not self.takes_real_values:
            end, slope = _hard_swish_parabola(self.inverse) if self.activation == "hard_swish" else (0.0, 0.0)
            polynomial = self._parabolas().tobytes() if self.is_piecewise else b""
            return self.zero, self.low, self.high, b"", 1.0, 0, end, slope, polynomial
        points_per_unit, first, last = self._grid()
        inputs = np.arange(first, last + 1).astype(F) / F(points_per_unit)
        values = activation_function(self.activation)(inputs) * F(self.inverse)
        table = _round_and_clamp(values, self.zero, self.low, self.high).tobytes()
        return self.zero, self.low, self.high, table, points_per_unit, first, 0.0, 0.0, b""

    def _shift_and_step(self) -> tuple[int, int]:
        """Return fixed-point settings of the piecewise approximation: a right shift and the output's scale.

        After the shift a segment is 4096 units wide; the output's scale is in 1/32768 of such a unit.
        """
        units = 4096 / _SEGMENT_WIDTH / self.inverse  # units per step before the shift; at most 128 fit into 16 bits
        shift = max(1, math.ceil(math.log2(units / 128)))
        return shift, round(32768 / (units / 2**shift))

    def _parabolas(self) -> Array:
        """Return the coefficients of eight parabolas c0 + c1 t + c2 t² for SiLU on 0 <= t < 1; then shift and step."""
        shift, step = self._shift_and_step()
        units_per_one = 32768 / step * self.inverse
        # Interpolate at the Chebyshev nodes of each segment, which keeps the largest error small.
        nodes = (1 - np.cos((2 * np.arange(3) + 1) * np.pi / 6)) / 2
        t = (np.arange(_SEGMENTS)[:, None] + nodes) / _SEGMENTS
        x = t * (32768 / 2**shift / units_per_one)
        powers = t[..., None] ** np.arange(3)
        heights = units_per_one * x / (1 + np.exp(x))
        coefficients = np.linalg.solve(powers, heights[..., None])[..., 0]  # (segment, power)
        return np.concatenate([np.rint(coefficients.T).astype(np.int16).reshape(-1), np.array([shift, step], np.int16)])

    def _grid(self) -> tuple[float, int, int]:
        """Return the lookup table's points per unit (a power of two), first and last point (integers)."""
        inverse = min(max(self.inverse, 1e-30), 1e30)
        lowest, highest = self.zero / inverse, (self.high - self.zero) / inverse
        # Extend to the left until |activation(-left)|, roughly left * 2^(-1.44 left), is below a quarter step.
        left = 4.0
        while left < 16 and left * 0.5 ** int(1.44 * left) * inverse > 0.25:
            left += 1
        right = left
        if is_leaky(self.activation):  # the table ends where the output's range ends
            left, right = max(lowest / leaky_slope(self.activation), 2 / inverse), highest + 1 / inverse
        elif self.activation not in ("sigmoid", "hard_sigmoid"):  # the others dip below 0 and are unbounded above
            left = 4 * lowest if lowest < 0.1 else left
            right = min(2 * highest, highest + 1)
        points_per_unit = 2.0 ** (math.frexp(_POINTS_PER_STEP * inverse)[1] - 1)
        while (left + right) * points_per_unit > _MAX_POINTS:
            points_per_unit /= 2
        return points_per_unit, -math.ceil(left * points_per_unit), math.ceil(right * points_per_unit)


# low, high, index in INT16_ACTIVATIONS, inverse scale; hard-swish: end and slope of its parabola; coefficients as bytes
NativeInt16Stage = tuple[int, int, int, float, float, float, bytes]
INT16_ACTIVATIONS = ("", "hard_swish", "hard_sigmoid", "sigmoid", "silu", "gelu", "pieces", "leaky_relu")
APPROXIMATION_END = {"silu": 9.5, "gelu": 4.5}  # beyond this input, ReLU minus the activation is below 1/1000
_APPROXIMATION_PRECISION = 80_000  # the approximation's error is at most the largest result divided by this
# Values per output step that an approximation may read: odd numbers, so that no value is halfway between two steps.
_UNITS_PER_STEP = (7, 5, 3, 1)


def _relu_minus_gelu(x: Array) -> Array:
    """Compute relu(x) - gelu(x) = x · P(Z > x) for x >= 0 and a standard normal Z."""
    upper_probability = np.array([math.erfc(each / math.sqrt(2)) / 2 for each in x.flat]).reshape(x.shape)
    return np.asarray(x * upper_probability)


# max(x, 0) less the activation: symmetric around 0, so it is defined for x >= 0 only.
_RELU_MINUS: dict[str, Callable[[Array], Array]] = {"silu": lambda x: x / (1 + np.exp(x)), "gelu": _relu_minus_gelu}


@dataclass(frozen=True)
class Int16OutputStage:
    """Requantization to int16: clamp(round(value), low, high), after the activation if there is one.

    Hard-swish is a parabola. SiLU and GELU are ReLU less a piecewise cubic in 16-bit integers, and are computed in
    float if the output's steps are so fine that 16 bits do not reach to the end of the approximation. Gates (sigmoid,
    hard-sigmoid) are always computed in float.
    """

    activation: str = ""
    inverse: float = 1.0  # 1 / scale of the output
    low: int = 0
    high: int = 0
    zero = 0

    @property
    def takes_real_values(self) -> bool:
        """Tell whether the stage reads real numbers, not multiples of the output's scale."""
        return not (self.activation in ("", "hard_swish") or self._polynomial or is_leaky(self.activation))

    @property
    def units_per_step(self) -> float:
        """Resolution of the values that the stage reads, relative to the output's step."""
        return 1.0 if self._polynomial is None else 32768 / self._polynomial.step

    @property
    def _polynomial(self) -> _Int16Piecewise | None:
        return _int16_polynomial(self.activation, self.inverse, self.high) if self.activation in _RELU_MINUS else None

    def requantize(self, value: Array) -> Array:
        """Convert accumulators to stored integers."""
        return requantize(value, self.native())

    def native(self) -> NativeInt16Stage:
        """Return the stage as the tuple that compiled kernels take."""
        if is_leaky(self.activation):
            kind, slope = INT16_ACTIVATIONS.index("leaky_relu"), leaky_slope(self.activation)
            return self.low, self.high, kind, self.inverse, 0.0, slope, b""
        end, slope = _hard_swish_parabola(self.inverse) if self.activation == "hard_swish" else (0.0, 0.0)
        polynomial = self._polynomial
        kind = INT16_ACTIVATIONS.index(self.activation if polynomial is None else "pieces")
        return self.low, self.high, kind, self.inverse, end, slope, b"" if polynomial is None else polynomial.native


@dataclass(frozen=True)
class _Int16Piecewise:
    """Int16Piecewise of native/kernels/int8_elementwise.h as bytes, and the output step in units of 1/32768."""

    native: bytes
    step: int


@lru_cache(maxsize=256)
def _int16_polynomial(activation: str, inverse: float, high: int) -> _Int16Piecewise | None:
    """Fit cubics to ReLU minus an activation, for int16 arithmetic; None if int16 cannot represent its whole domain.

    `inverse` is 1 / scale of the output, `high` its largest integer.
    """
    difference = _RELU_MINUS[activation]
    # The approximation ends where the difference is below `negligible` steps.
    x = np.arange(1, 40 * 64) / 64
    negligible = max(high / _APPROXIMATION_PRECISION, 0.05)
    largest_input = float((x[difference(x) * inverse > negligible] + 1 / 64).max(initial=1 / 64))
    end = min(largest_input, APPROXIMATION_END[activation])
    units = next((n for n in _UNITS_PER_STEP if 32767 / n >= max(end * inverse, high)), None)
    if units is None:
        return None
    # Map 0 .. end to 0 .. 32767 by a 16-bit multiplication and a shift, so that the upper bits number the segment.
    step = min(32767, round(32768 / units))
    unit = step / 32768 / inverse
    end_in_units = min(32767, math.ceil(end / unit))
    shift = math.ceil(math.log2(32767 / end_in_units))
    factor = min(32767, int(32767 / end_in_units / 2**shift * 32768))
    while _high_product(np.array(end_in_units), np.array(factor)) << shift > 32767:
        factor -= 1
    # Fit a cubic per segment to 64 samples of it; the last segment ends at 0.
    t = (np.arange(64) + 0.5) / 64
    inputs = (np.arange(_SEGMENTS)[:, None] + t) * (32768 / _SEGMENTS / 2**shift) * (32768 / factor)
    heights = difference(inputs * unit) / unit
    heights[-1] -= heights[-1, -1] * t
    coefficients, extra_bits = _fit_cubics(t, heights)
    largest_value = min(32767, (high * 32768 + 16383) // step)
    settings = np.array([end_in_units, factor, shift, min(32767, 32768 >> extra_bits), step, largest_value])
    content = np.concatenate([coefficients.reshape(-1), settings]).astype(np.int16)
    return _Int16Piecewise(content.tobytes(), step)


def _fit_cubics(t: Array, heights: Array) -> tuple[Array, int]:
    """Fit a cubic to each segment's samples `heights` (segment, samples) at positions `t` (samples) in [0, 1].

    Returns integer coefficients (power, segment) and the number of fractional bits they have. The mean of each segment
    is kept exactly, because an error that all values share would add up in the layers that sum them.
    """
    powers = t[:, None] ** np.arange(4)
    coefficients = heights @ np.linalg.pinv(powers).T  # (segment, power)
    extra_bits = int(np.clip(np.log2(30000 / max(np.abs(coefficients).sum(1).max(), 1e-3)), 0, 12))
    rounded = np.rint(coefficients * 2**extra_bits)
    rounded[:, 0] = np.rint((heights * 2**extra_bits - rounded[:, 1:] @ powers[:, 1:].T).mean(1))
    return rounded.T, extra_bits


def _piecewise_int16(value: Array, polynomial: bytes) -> Array:
    """Compute SiLU or GELU with the cubics `polynomial`, bit-equal to native/kernels/int8_elementwise.h."""
    numbers = np.frombuffer(polynomial, np.int16).astype(np.int32)
    coefficients, (end, factor, shift, rounding, step, most) = numbers[:-6].reshape(4, _SEGMENTS), numbers[-6:]
    u = _round_within(value, -32767, most)
    t = _high_product(np.minimum(np.abs(u), end), factor) << shift
    segment, d = t >> 12, (t & 4095) << 3
    # Horner's scheme, from the cubic coefficient down.
    height = coefficients[3][segment]
    for c in coefficients[2::-1]:
        height = c[segment] + _high_product(d, height)
    return _high_product(np.maximum(u, 0) - _high_product(height, rounding), step)


def _requantize_int16(value: Array, stage: NativeInt16Stage) -> Array:
    """Convert accumulators to int16, as the compiled kernels do."""
    low, high, kind, inverse, end, slope, polynomial = stage
    name = INT16_ACTIVATIONS[kind]
    if name == "pieces":
        return _piecewise_int16(value, polynomial).astype(np.int16)
    if name == "hard_swish":
        value = _hard_swish(value, F(end), F(slope))
    elif name == "leaky_relu":
        value = np.maximum(value, value * F(slope))
    elif name:
        value = _TABLE_FREE.get(name, ACTIVATION_FUNCTIONS[name])(value) * F(inverse)
    return _round_within(value, low, high).astype(np.int16)


def requantize(value: Array, stage: NativeUint8Stage | NativeInt16Stage) -> Array:
    """Convert accumulators to uint8 or int16, as the compiled kernels do."""
    if len(stage) == 7:
        return _requantize_int16(value, stage)
    zero, low, high, table, points_per_unit, first, end, slope, polynomial = stage
    if polynomial:
        return _piecewise_uint8(value, zero, low, np.frombuffer(polynomial, np.int16).astype(np.int32))
    if not table:
        return _round_and_clamp(_hard_swish(value, F(end), F(slope)) if end else value, zero, low, high)
    with np.errstate(over="ignore"):
        points = _round_within(value * F(points_per_unit), first, first + len(table) - 1) - first
    return np.asarray(np.frombuffer(table, np.uint8)[points])


def _hard_swish_parabola(inverse: float) -> tuple[float, float]:
    """Return the end (3) and the slope of hard-swish's parabola in units of the output's scale."""
    return 3 * inverse, -1 / (6 * inverse)


def _hard_swish(value: Array, end: F, slope: F) -> Array:
    """Compute hard-swish of accumulators with the `end` and `slope` of `_hard_swish_parabola`."""
    magnitude = np.abs(value)
    d = np.where(magnitude < end, magnitude, end)
    return np.asarray(np.where(value > 0, value, F(0)) - d * (d * slope + F(0.5)))


def _piecewise_uint8(value: Array, zero: int, low: int, numbers: Array) -> Array:
    """Compute SiLU in 16-bit integers with the parabola coefficients `numbers`, bit-equal to the C++ kernel."""
    (c0, c1, c2), (shift, step) = numbers[:-2].reshape(3, _SEGMENTS), numbers[-2:]
    u = _round_within(value, -32767, _MAX_PIECEWISE_INPUT)
    t = np.minimum(np.abs(u), 32767 >> shift) << shift
    segment = t >> 12
    difference = c0[segment] + _high_product(t, c1[segment] + _high_product(t, c2[segment]))
    steps = _high_product(np.maximum(u, 0) - difference, step)
    return np.asarray(np.clip(steps + zero, low, 255).astype(np.uint8))


def _high_product(a: Array, b: Array) -> Array:
    """Multiply 16-bit fixed-point numbers (15 fractional bits) with rounding, as `vpmulhrsw` does."""
    return (a * b + (1 << 14)) >> 15


def multiply_by_fractions(integers: Array, fractions: Array, low: int, high: int) -> Array:
    """Multiply int16 values by `fractions` / 32768 (at most 32767), round, and clamp to [low, high]."""
    product = _high_product(integers, _round_within(fractions, -32767, 32767))
    return np.clip(product, low, high).astype(np.int16)


def _round_and_clamp(value: Array, zero: int, low: int, high: int) -> Array:
    return np.asarray((_round_within(value, low - zero, high - zero) + zero).astype(np.uint8))


def _round_within(value: Array, low: int, high: int) -> Array:
    """Round to the nearest integers in [low, high], ties to even; NaN becomes `low`."""
    clipped = np.minimum(np.where(value > low, value, F(low)), F(high))
    return np.asarray(np.rint(clipped).astype(np.int32))


# --- activations in float32: the arithmetic of the compiled kernels, operation by operation ---


def _exp(x: Array) -> Array:
    """Compute exp(x) as 2^n exp(r) with |r| <= ln(2) / 2; ln(2) is split in two parts (Cody and Waite)."""
    magic = F(12582912)  # 1.5 * 2^23: adding it rounds to an integer
    x = np.maximum(F(-104), np.minimum(F(89), x))
    n = (x * F(1.44269504088896341) + magic) - magic
    r = x - n * F(0.693359375)
    r = r + n * F(2.12194442e-4)
    p = np.full_like(x, 1.39264006e-3)
    for c in (8.36335309e-3, 4.16665524e-2, 1.66665763e-1, 0.5):
        p = p * r + F(c)
    p = p * (r * r) + (r + F(1))
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(np.ldexp(p, n.astype(np.int32)))


def _coarse_exp(x: Array) -> Array:
    """Compute exp(x) by a short polynomial, for formulas that add 1 to the result."""
    magic = F(12582912)  # as in _exp
    x = np.maximum(F(-87), np.minimum(F(89), x))
    shifted = x * F(1.44269504088896341) + magic
    r = x - (shifted - magic) * F(0.693147180559945309)
    square = r * r
    high, low = F(8.31253e-3) * r + F(4.189011e-2), F(1.6667114e-1) * r + F(0.4999923)
    p = (high * square + low) * square + (r + F(1))
    # The integer is in the low bits of `shifted`; moved to the exponent, they are 2^n.
    with np.errstate(over="ignore"):
        return np.asarray(p * ((shifted.view(np.uint32) << np.uint32(23)) + np.uint32(0x3F800000)).view(np.float32))


def _erf(x: Array) -> Array:
    """Compute erf(x) for x in [-4, 4] as a quotient of polynomials in x²."""
    x = np.maximum(F(-4), np.minimum(F(4), x))
    t = x * x
    p, q = np.full_like(x, 2.04631510e-6), np.full_like(x, 3.80479178e-5)
    for c in (2.84789654e-4, 3.77045455e-3, 5.27628623e-2, 1.90545887e-1, 1.12837911):
        p = p * t + F(c)
    for c in (1.16333587e-3, 1.49790263e-2, 1.14162832e-1, 5.02199650e-1, 1.0):
        q = q * t + F(c)
    return np.maximum(F(-1), np.minimum(F(1), np.where(t == F(16), x * F(0.25), x * p / q)))


def _hard_sigmoid(x: Array) -> Array:
    return np.minimum(F(6), np.maximum(F(0), x + F(3))) * F(1 / 6)


ACTIVATION_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "silu": lambda x: x / (F(1) + _exp(-x)),
    "sigmoid": lambda x: F(1) / (F(1) + _exp(-x)),
    "hard_swish": lambda x: x * _hard_sigmoid(x),
    "hard_sigmoid": _hard_sigmoid,
    "gelu": lambda x: x * (F(0.5) + F(0.5) * _erf(x * F(0.707106781186547524))),
}


def is_curved(activation: str) -> bool:
    """Tell whether an activation is a function that requantization has to compute, not a clamp."""
    return activation in ACTIVATION_FUNCTIONS or is_leaky(activation)


def activation_function(activation: str) -> Callable[[Array], Array]:
    """Return the float32 function of an activation that is not piecewise linear, such as SiLU."""
    if not is_leaky(activation):
        return ACTIVATION_FUNCTIONS[activation]
    slope = F(leaky_slope(activation))
    return lambda x: np.maximum(x, x * slope)


_TABLE_FREE: dict[str, Callable[[Array], Array]] = {  # computed for every value, if there is no lookup table
    "silu": lambda x: x / (F(1) + _coarse_exp(-x)),
    "sigmoid": lambda x: F(1) / (F(1) + _coarse_exp(-x)),
}


class NumpyInt8Layer:
    """A packed layer with weights (O, kh, kw, C / groups): (sum + offset) * scale, requantized or kept as float.

    Methods have the names and arguments of the compiled layers (`native.Int8Layer`).
    """

    def __init__(
        self,
        weights: Array,
        offset: Array,
        scale: Array | None,
        bias: Array | None,
        stride: Pair,
        padding: Pair | Four,
        groups: int = 1,
        dilation: Pair = (1, 1),
    ) -> None:
        """Store integer weights with offset and scale per output channel, and the convolution's settings."""
        self._weights, self._offset, self._scale, self._bias = weights, offset, scale, bias
        self._stride, self._groups, self._dilation = stride, groups, dilation
        self._padding = (*padding, *padding)[:4]
        self._stage: NativeUint8Stage | NativeInt16Stage = Uint8OutputStage().native()
        self._residual = (0.0, 0)

    def set_output(self, zero: int, low: int, high: int) -> None:
        self.set_uint8_stage(Uint8OutputStage("", 1.0, zero, low, high).native())

    def set_uint8_stage(self, stage: NativeUint8Stage | NativeInt16Stage) -> None:
        self._stage = stage

    set_int16_stage = set_uint8_stage

    def set_residual(self, scale: float, zero: int, _is_int16: bool = False) -> None:
        self._residual = (scale, zero)

    def _zeros(self, shape: tuple[int, ...]) -> Array:
        """Return a result array of this shape filled with the zero point."""
        return np.zeros(shape, np.int16) if len(self._stage) == 7 else np.full(shape, self._stage[0], np.uint8)

    def conv(self, x: Array, padding: int, residual: Array | None, residual_padding: int, out_padding: int) -> Array:
        """Convolve images (N, H, W, C), add the residual, and requantize into a padded result."""
        sums = self._sums(x, padding)  # (N, H, W, O)
        assert self._scale is not None
        value = sums.astype(np.float32) * self._scale
        n, h, w, filters = sums.shape
        if residual is not None:
            p, (scale, zero) = residual_padding, self._residual
            skip = residual[:, p : p + h, p : p + w, :filters].astype(np.int32) - zero
            value = value + skip.astype(np.float32) * np.float32(scale)
        out = self._zeros((n, h + 2 * out_padding, w + 2 * out_padding, -(-filters // 4) * 4))
        out[:, out_padding : out_padding + h, out_padding : out_padding + w, :filters] = requantize(value, self._stage)
        return out

    def linear(self, x: Array, kind: int, row_scale: Array | None, relu: bool) -> Array:
        """Multiply rows (N, C) with the weights; `kind` is INT32, FLOAT32 or UINT8 of `layers`."""
        outputs, channels = self._weights.shape[0], self._weights.shape[3]
        # Both dtypes hold the sums exactly; products of int16 would overflow int32, and float64 uses BLAS.
        exact = np.float64 if self._weights.dtype == np.int16 else np.int32
        product = x[:, :channels].astype(exact) @ self._weights.reshape(outputs, channels).T.astype(exact)
        sums: Array = product.astype(np.int32) + self._offset
        if kind == 0:
            return sums.astype(np.int32)
        assert self._scale is not None
        value: Array = sums.astype(np.float32) * self._scale
        if kind == 2:
            out = self._zeros((len(x), -(-outputs // 4) * 4))
            out[:, :outputs] = requantize(value, self._stage)
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

    def _sums(self, x: Array, padding: int) -> Array:
        """Return the accumulators (N, H, W, O): the windows of each group times its filters, plus the offsets."""
        filters, kh, kw, channels = self._weights.shape
        top, left, bottom, right = self._padding
        (dh, dw), (sh, sw) = self._dilation, self._stride
        # The stored padding may be wider than this convolution's.
        x = x[:, padding - top : x.shape[1] - padding + bottom, padding - left : x.shape[2] - padding + right]
        reach = ((kh - 1) * dh + 1, (kw - 1) * dw + 1)
        exact = np.float64 if self._weights.dtype == np.int16 else np.int32  # as in `linear`
        windows = np.lib.stride_tricks.sliding_window_view(x.astype(exact), reach, (1, 2))  # (N, H, W, C, kh, kw)
        windows = windows[:, ::sh, ::sw, :, ::dh, ::dw]
        per_group = filters // self._groups
        if channels == per_group == 1:  # depthwise
            own = np.einsum("nhwckl,ckl->nhwc", windows[:, :, :, :filters], self._weights[..., 0].astype(exact))
            return np.asarray(own.astype(np.int32) + self._offset)
        sums = np.empty((*windows.shape[:3], filters), np.int32)
        for g in range(self._groups):
            group_windows = windows[:, :, :, g * channels : (g + 1) * channels]
            w = self._weights[g * per_group : (g + 1) * per_group].astype(exact)
            sums[..., g * per_group : (g + 1) * per_group] = np.tensordot(group_windows, w, ([3, 4, 5], [3, 1, 2]))
        return sums + self._offset
