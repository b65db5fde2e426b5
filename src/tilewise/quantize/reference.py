"""The integer layers in NumPy: what the compiled ones must equal to the last bit, and what runs without them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Pair = tuple[int, int]
Four = tuple[int, int, int, int]
F = np.float32


# zero, low, high; table, points of its grid in 1, the first; of hard-swish how far it bends (else 0), and its slope;
# of SiLU its pieces: c0, c1 and c2 of each, shift and step
NativeFinish = tuple[int, int, int, bytes, float, int, float, float, bytes]
_POINTS_A_STEP = 16  # of the grid, in a step of the output; at least half of it, as far as _MOST_POINTS allow
_MOST_POINTS = 1 << 14
_PIECES, _PIECE = 8, 17 / 16  # of SiLU: parabolas from 0 on either side, and how wide one is; behind them it is 0 or x
_SCALES_IN_PIECES = 1 / 64, 64.0  # where the parabolas are off by a tenth of a step at most, and 16 bits hold them
_MOST_IN_PIECES = 32700  # native/kernels/int8_elementwise.h: kMostInPieces


@dataclass(frozen=True)
class Finish:
    """From values to bytes: clamp(round(value) + zero, low, high), of hard-swish's values where it is asked for;
    of other activations act(value) * inverse.

    SiLU is x or 0, less a bump at 0 that is the same on both sides: parabolas, in whole numbers of 16 bits. The others,
    and SiLU with very fine steps, are tables: the value is rounded to a grid much finer than the output's steps, and a
    point of the grid has its byte. Left of the table's first point an activation is as good as 0, or below what the
    output's bytes were made for; right of its last one it is above.
    """

    activation: str = ""
    inverse: float = 1.0
    zero: int = 0
    low: int = 0
    high: int = 255

    @property
    def is_table(self) -> bool:
        """Whether values are real numbers, not steps of the output."""
        return bool(self.activation) and self.activation != "hard_swish" and not self.in_pieces

    @property
    def in_pieces(self) -> bool:
        lowest, highest = _SCALES_IN_PIECES
        return self.activation == "silu" and lowest <= 1 / self.inverse <= highest and self.high == 255

    @property
    def units(self) -> float:
        """That values are counted in, in a step of the output."""
        return 32768 / self._shift_and_step()[1] if self.in_pieces else 1.0

    def bytes(self, value: Array) -> Array:
        return finished(value, self.native())

    def native(self) -> NativeFinish:
        if not self.is_table:
            hard = self.activation == "hard_swish"
            far, slope = (3 * self.inverse, -1 / (6 * self.inverse)) if hard else (0.0, 0.0)
            pieces = self._pieces().tobytes() if self.in_pieces else b""
            return self.zero, self.low, self.high, b"", 1.0, 0, far, slope, pieces
        fine, first, last = self._grid()
        values = activation_function(self.activation)(np.arange(first, last + 1).astype(F) / F(fine)) * F(self.inverse)
        table = _clamped(values, self.zero, self.low, self.high).tobytes()
        return self.zero, self.low, self.high, table, fine, first, 0.0, 0.0, b""

    def _shift_and_step(self) -> tuple[int, int]:
        """Units become 4096 of a piece by the shift, and steps of the output by `step` / 32768."""
        units = 4096 / _PIECE / self.inverse  # in a step, before the shift: at most 128 of them fit
        shift = max(1, math.ceil(math.log2(units / 128)))
        return shift, round(32768 / (units / 2**shift))

    def _pieces(self) -> Array:
        """c0, c1 and c2 of h = c0 + c1 t + c2 t^2, in units, for each eighth of 0 <= t < 1; shift and step."""
        shift, step = self._shift_and_step()
        in_one = 32768 / step * self.inverse  # units
        nodes = (1 - np.cos((2 * np.arange(3) + 1) * np.pi / 6)) / 2  # of a parabola that is off as little as can be
        t = (np.arange(_PIECES)[:, None] + nodes) / _PIECES
        x = t * (32768 / 2**shift / in_one)
        powers = t[..., None] ** np.arange(3)
        found = np.linalg.solve(powers, (in_one * x / (1 + np.exp(x)))[..., None])[..., 0]  # (piece, power)
        return np.concatenate([np.rint(found.T).astype(np.int16).reshape(-1), np.array([shift, step], np.int16)])

    def _grid(self) -> tuple[float, int, int]:
        """Points in 1 (a power of two), the first and the last."""
        inverse = min(max(self.inverse, 1e-30), 1e30)
        lowest, highest = self.zero / inverse, (self.high - self.zero) / inverse
        left = 4.0
        while left < 16 and left * 0.5 ** int(1.44 * left) * inverse > 0.25:  # |act(-left)| in steps, about
            left += 1
        right = left
        if is_leaky(self.activation):  # ends where the output's bytes end
            left, right = max(lowest / leaky_slope(self.activation), 2 / inverse), highest + 1 / inverse
        elif self.activation not in ("sigmoid", "hard_sigmoid"):  # those that dip below 0, and rise without an end
            left = 4 * lowest if lowest < 0.1 else left
            right = min(2 * highest, highest + 1)
        fine = 2.0 ** (math.frexp(_POINTS_A_STEP * inverse)[1] - 1)
        while (left + right) * fine > _MOST_POINTS:
            fine /= 2
        return fine, -math.ceil(left * fine), math.ceil(right * fine)


# low, high, the curve's place in WIDE_CURVES, inverse; of hard-swish how far it bends, and its slope; the pieces' bytes
NativeWideFinish = tuple[int, int, int, float, float, float, bytes]
WIDE_CURVES = ("", "hard_swish", "hard_sigmoid", "sigmoid", "silu", "gelu", "pieces", "leaky_relu")
BENT_TO = {"silu": 9.5, "gelu": 4.5}  # beyond, the bump is less than a thousandth
_FINEST = 80_000  # parts of its largest result that an activation in pieces is off by
_UNITS = (7, 5, 3, 1)  # that values may be counted in, in a step: odd, so that none lies in the middle of two steps


def _gelu_bump(x: Array) -> Array:
    tail: Array = np.array([math.erfc(each / math.sqrt(2)) / 2 for each in x.flat]).reshape(x.shape)
    return x * tail


# What is taken away from max(x, 0), on either side of 0
_BUMPS: dict[str, Callable[[Array], Array]] = {"silu": lambda x: x / (1 + np.exp(x)), "gelu": _gelu_bump}


@dataclass(frozen=True)
class WideFinish:
    """From values to numbers of 16 bits: clamp(round(value), low, high), of hard-swish's values where it is asked for;
    of gates act(value) * inverse, computed. SiLU and GELU are x or 0, less a bump at 0: eight cubics, in whole numbers
    of 16 bits; with steps so fine that 16 bits do not reach to where the bump ends, they are computed too."""

    activation: str = ""
    inverse: float = 1.0
    low: int = 0
    high: int = 0
    zero = 0

    @property
    def is_table(self) -> bool:
        """Whether values are real numbers, not steps of the output."""
        return self.activation not in ("", "hard_swish") and self._pieces is None and not is_leaky(self.activation)

    @property
    def units(self) -> float:
        """That values are counted in, in a step of the output."""
        return 1.0 if self._pieces is None else 32768 / self._pieces.step

    @property
    def _pieces(self) -> _WidePieces | None:
        return _wide_pieces(self.activation, self.inverse, self.high) if self.activation in _BUMPS else None

    def bytes(self, value: Array) -> Array:
        return finished(value, self.native())

    def native(self) -> NativeWideFinish:
        if is_leaky(self.activation):
            curve = WIDE_CURVES.index("leaky_relu")
            return self.low, self.high, curve, self.inverse, 0.0, leaky_slope(self.activation), b""
        bends, pieces = self.activation == "hard_swish", self._pieces
        far, slope = (3 * self.inverse, -1 / (6 * self.inverse)) if bends else (0.0, 0.0)
        curve = WIDE_CURVES.index(self.activation if pieces is None else "pieces")
        return self.low, self.high, curve, self.inverse, far, slope, b"" if pieces is None else pieces.native


@dataclass(frozen=True)
class _WidePieces:
    """native/kernels/int8_elementwise.h: the bytes of Int16Piecewise, and the output step in units of 1/32768."""

    native: bytes
    step: int


@lru_cache(maxsize=256)
def _wide_pieces(activation: str, inverse: float, high: int) -> _WidePieces | None:
    """The cubics of a bump; None where 16 bits do not reach to its end."""
    bump = _BUMPS[activation]
    x = np.arange(1, 40 * 64) / 64
    small = max(high / _FINEST, 0.05)  # in steps: what is left of the bump at its end
    end = min(float((x[bump(x) * inverse > small] + 1 / 64).max(initial=1 / 64)), BENT_TO[activation])
    units = next((n for n in _UNITS if 32767 / n >= max(end * inverse, high)), None)
    if units is None:
        return None
    step = min(32767, round(32768 / units))
    unit = step / 32768 / inverse
    far = min(32767, math.ceil(end / unit))
    shift = math.ceil(math.log2(32767 / far))
    turn = min(32767, int(32767 / far / 2**shift * 32768))
    while _high_product(np.array(far), np.array(turn)) << shift > 32767:
        turn -= 1
    d = (np.arange(64) + 0.5) / 64
    sizes = (np.arange(_PIECES)[:, None] + d) * (32768 / _PIECES / 2**shift) * (32768 / turn)
    heights = bump(sizes * unit) / unit
    heights[-1] -= heights[-1, -1] * d  # it ends at 0
    numbers, finer = _cubics(d, heights)
    most = min(32767, (high * 32768 + 16383) // step)
    rest = np.array([far, turn, shift, min(32767, 32768 >> finer), step, most])
    return _WidePieces(np.concatenate([numbers.reshape(-1), rest]).astype(np.int16).tobytes(), step)


def _cubics(d: Array, heights: Array) -> tuple[Array, int]:
    """(power, piece) whole coefficients, as much finer as 16 bits allow: by so many bits. The mean of a piece is kept:
    an error that all values share adds up in the sums that read them."""
    powers = d[:, None] ** np.arange(4)
    found = heights @ np.linalg.pinv(powers).T  # (piece, power)
    finer = int(np.clip(np.log2(30000 / max(np.abs(found).sum(1).max(), 1e-3)), 0, 12))
    whole = np.rint(found * 2**finer)
    whole[:, 0] = np.rint((heights * 2**finer - whole[:, 1:] @ powers[:, 1:].T).mean(1))
    return whole.T, finer


def _in_wide_pieces(value: Array, pieces: bytes) -> Array:
    """SiLU or GELU, as native/kernels/int8_elementwise.h says."""
    numbers = np.frombuffer(pieces, np.int16).astype(np.int32)
    coefficients, (far, turn, shift, rounds, step, most) = numbers[:-6].reshape(4, _PIECES), numbers[-6:]
    u = _whole(value, -32767, most)
    t = _high_product(np.minimum(np.abs(u), far), turn) << shift
    at, d = t >> 12, (t & 4095) << 3
    h = coefficients[3][at]
    for c in coefficients[2::-1]:
        h = c[at] + _high_product(d, h)
    return _high_product(np.maximum(u, 0) - _high_product(h, rounds), step)


def _finished_wide(value: Array, how: NativeWideFinish) -> Array:
    low, high, curve, inverse, far, slope, pieces = how
    name = WIDE_CURVES[curve]
    if name == "pieces":
        return _in_wide_pieces(value, pieces).astype(np.int16)
    if name == "hard_swish":
        value = _bent(value, F(far), F(slope))
    elif name == "leaky_relu":
        value = np.maximum(value, value * F(slope))
    elif name:
        value = _COMPUTED.get(name, BENT[name])(value) * F(inverse)
    return _whole(value, low, high).astype(np.int16)


def finished(value: Array, how: NativeFinish | NativeWideFinish) -> Array:
    """Values to bytes, or to 16 bits, as the compiled kernels do it."""
    if len(how) == 7:
        return _finished_wide(value, how)
    zero, low, high, table, fine, first, far, slope, pieces = how
    if pieces:
        return _in_pieces(value, zero, low, np.frombuffer(pieces, np.int16).astype(np.int32))
    if not table:
        return _clamped(_bent(value, F(far), F(slope)) if far else value, zero, low, high)
    with np.errstate(over="ignore"):
        places = _whole(value * F(fine), first, first + len(table) - 1) - first
    chosen: Array = np.frombuffer(table, np.uint8)[places]
    return chosen


def _bent(value: Array, far: F, slope: F) -> Array:
    """Hard-swish: max(value, 0), less a parabola on either side of 0."""
    size = np.abs(value)
    d = np.where(size < far, size, far)
    rest: Array = np.where(value > 0, value, F(0)) - d * (d * slope + F(0.5))
    return rest


def _in_pieces(value: Array, zero: int, low: int, numbers: Array) -> Array:
    """SiLU, as native/kernels/int8_elementwise.h says."""
    (c0, c1, c2), (shift, step) = numbers[:-2].reshape(3, _PIECES), numbers[-2:]
    u = _whole(value, -32767, _MOST_IN_PIECES)
    t = np.minimum(np.abs(u), 32767 >> shift) << shift
    at = t >> 12
    bump = c0[at] + _high_product(t, c1[at] + _high_product(t, c2[at]))
    steps = _high_product(np.maximum(u, 0) - bump, step)
    clamped: Array = np.clip(steps + zero, low, 255).astype(np.uint8)
    return clamped


def _high_product(a: Array, b: Array) -> Array:
    return (a * b + (1 << 14)) >> 15


def by_fractions(whole: Array, fractions: Array, low: int, high: int) -> Array:
    """16-bit numbers times parts of 32768, of which there are 32767 at most either way."""
    product = _high_product(whole, _whole(fractions, -32767, 32767))
    return np.clip(product, low, high).astype(np.int16)


def _clamped(value: Array, zero: int, low: int, high: int) -> Array:
    clamped: Array = (_whole(value, low - zero, high - zero) + zero).astype(np.uint8)
    return clamped


def _whole(value: Array, low: int, high: int) -> Array:
    """The nearest whole numbers in [low, high], ties to even; a NaN becomes `low`."""
    clipped = np.minimum(np.where(value > low, value, F(low)), F(high))
    rounded: Array = np.rint(clipped).astype(np.int32)
    return rounded


# --- activations that bytes cannot have by being clamped: the compiled kernels' arithmetic, operation by operation ---


def _exp(x: Array) -> Array:
    magic = F(12582912)
    x = np.maximum(F(-104), np.minimum(F(89), x))
    n = (x * F(1.44269504088896341) + magic) - magic
    r = x - n * F(0.693359375)
    r = r + n * F(2.12194442e-4)
    p = np.full_like(x, 1.39264006e-3)
    for c in (8.36335309e-3, 4.16665524e-2, 1.66665763e-1, 0.5):
        p = p * r + F(c)
    p = p * (r * r) + (r + F(1))
    with np.errstate(over="ignore", under="ignore"):
        scaled: Array = np.ldexp(p, n.astype(np.int32))
    return scaled


def _exp_of_sum(x: Array) -> Array:
    """exp(x) where 1 is added to it."""
    magic = F(12582912)
    x = np.maximum(F(-87), np.minimum(F(89), x))
    shifted = x * F(1.44269504088896341) + magic
    r = x - (shifted - magic) * F(0.693147180559945309)
    square = r * r
    high, low = F(8.31253e-3) * r + F(4.189011e-2), F(1.6667114e-1) * r + F(0.4999923)
    p = (high * square + low) * square + (r + F(1))
    with np.errstate(over="ignore"):
        scaled: Array = p * ((shifted.view(np.uint32) << np.uint32(23)) + np.uint32(0x3F800000)).view(np.float32)
    return scaled


def _erf(x: Array) -> Array:
    x = np.maximum(F(-4), np.minimum(F(4), x))
    t = x * x
    p, q = np.full_like(x, 2.04631510e-6), np.full_like(x, 3.80479178e-5)
    for c in (2.84789654e-4, 3.77045455e-3, 5.27628623e-2, 1.90545887e-1, 1.12837911):
        p = p * t + F(c)
    for c in (1.16333587e-3, 1.49790263e-2, 1.14162832e-1, 5.02199650e-1, 1.0):
        q = q * t + F(c)
    return np.maximum(F(-1), np.minimum(F(1), np.where(t == F(16), x * F(0.25), x * p / q)))


def _gate(x: Array) -> Array:
    return np.minimum(F(6), np.maximum(F(0), x + F(3))) * F(1 / 6)


BENT: dict[str, Callable[[Array], Array]] = {
    "silu": lambda x: x / (F(1) + _exp(-x)),
    "sigmoid": lambda x: F(1) / (F(1) + _exp(-x)),
    "hard_swish": lambda x: x * _gate(x),
    "hard_sigmoid": _gate,
    "gelu": lambda x: x * (F(0.5) + F(0.5) * _erf(x * F(0.707106781186547524))),
}


def is_leaky(activation: str) -> bool:
    """Whether an activation is a LeakyReLU, which is named with its slope: "leaky_relu 0.1"."""
    return activation.startswith("leaky_relu ")


def leaky_slope(activation: str) -> float:
    return float(activation.partition(" ")[2])


def is_curved(activation: str) -> bool:
    """Whether an activation is a function that requantization has to compute, not a clamp."""
    return activation in BENT or is_leaky(activation)


def activation_function(activation: str) -> Callable[[Array], Array]:
    """Return the float32 function of a curved activation."""
    if not is_leaky(activation):
        return BENT[activation]
    slope = F(leaky_slope(activation))
    return lambda x: np.maximum(x, x * slope)


_COMPUTED: dict[str, Callable[[Array], Array]] = {  # where there is no table
    "silu": lambda x: x / (F(1) + _exp_of_sum(-x)),
    "sigmoid": lambda x: F(1) / (F(1) + _exp_of_sum(-x)),
}


class NumpyInt8Layer:
    """weights (O, kh, kw, C / groups) int8; result = (sum + offset) * scale, rounded to bytes or kept as float."""

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
        self._weights, self._offset, self._scale, self._bias = weights, offset, scale, bias
        self._stride, self._groups, self._dilation = stride, groups, dilation
        self._padding = (*padding, *padding)[:4]
        self._finish: NativeFinish | NativeWideFinish = Finish().native()
        self._residual = (0.0, 0)

    def set_output(self, zero: int, low: int, high: int) -> None:
        self.set_finish(Finish("", 1.0, zero, low, high).native())

    def set_finish(self, finish: NativeFinish) -> None:
        self._finish = finish

    def set_wide_finish(self, finish: NativeWideFinish) -> None:
        self._finish = finish

    def set_residual(self, scale: float, zero: int, wide: bool = False) -> None:
        del wide  # the numbers say it themselves
        self._residual = (scale, zero)

    def _blank(self, shape: tuple[int, ...]) -> Array:
        """A result of zeros."""
        return np.zeros(shape, np.int16) if len(self._finish) == 7 else np.full(shape, self._finish[0], np.uint8)

    def conv(self, x: Array, border: int, residual: Array | None, residual_border: int, out_border: int) -> Array:
        sums = self._sums(x, border)  # (N, H, W, O)
        assert self._scale is not None
        value = sums.astype(np.float32) * self._scale
        n, h, w, filters = sums.shape
        if residual is not None:
            b, (scale, zero) = residual_border, self._residual
            skip = residual[:, b : b + h, b : b + w, :filters].astype(np.int32) - zero
            value = value + skip.astype(np.float32) * np.float32(scale)
        size = (n, h + 2 * out_border, w + 2 * out_border, -(-filters // 4) * 4)
        out = self._blank(size)
        out[:, out_border : out_border + h, out_border : out_border + w, :filters] = finished(value, self._finish)
        return out

    def linear(self, x: Array, kind: int, row_scale: Array | None, relu: bool) -> Array:
        outputs, channels = self._weights.shape[0], self._weights.shape[3]
        exact = np.float64 if self._weights.dtype == np.int16 else np.int32  # both; the former is quick
        product = x[:, :channels].astype(exact) @ self._weights.reshape(outputs, channels).T.astype(exact)
        sums: Array = product.astype(np.int32) + self._offset
        if kind == 0:
            return sums.astype(np.int32)
        assert self._scale is not None
        value: Array = sums.astype(np.float32) * self._scale
        if kind == 2:
            out = self._blank((len(x), -(-outputs // 4) * 4))
            out[:, :outputs] = finished(value, self._finish)
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
        """(N, H, W, O): the windows of each group times its filters."""
        filters, kh, kw, channels = self._weights.shape
        top, left, bottom, right = self._padding
        (dh, dw), (sh, sw) = self._dilation, self._stride
        x = x[:, border - top : x.shape[1] - border + bottom, border - left : x.shape[2] - border + right]
        reach = ((kh - 1) * dh + 1, (kw - 1) * dw + 1)
        kind = np.float64 if self._weights.dtype == np.int16 else np.int32  # exact either way
        windows = np.lib.stride_tricks.sliding_window_view(x.astype(kind), reach, (1, 2))  # (N, H, W, C, kh, kw)
        windows = windows[:, ::sh, ::sw, :, ::dh, ::dw]
        each = filters // self._groups
        if channels == each == 1:  # depthwise
            own = np.einsum("nhwckl,ckl->nhwc", windows[:, :, :, :filters], self._weights[..., 0].astype(kind))
            total: Array = own.astype(np.int32) + self._offset
            return total
        sums = np.empty((*windows.shape[:3], filters), np.int32)
        for g in range(self._groups):
            part = windows[:, :, :, g * channels : (g + 1) * channels]
            w = self._weights[g * each : (g + 1) * each].astype(kind)
            sums[..., g * each : (g + 1) * each] = np.tensordot(part, w, ([3, 4, 5], [3, 1, 2]))
        return sums + self._offset
