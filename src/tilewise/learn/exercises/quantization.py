"""Checks of the quantization lesson: a range that holds zero, a scale for each channel, and a product of integers."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.learn.checking import Exercise
from tilewise.learn.differential import Example, differential


def affine(low: float, high: float) -> tuple[float, int]:
    return _affine(low, high)


def _affine(low: float, high: float, steps: int = 255) -> tuple[float, int]:
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / steps or 1.0
    return scale, round(-low / scale)


_WIDEN = "the range must hold low, high and zero (padding and ReLU write zeros) in 255 steps"
_INTEGER = "the zero point is -low / scale, rounded to the nearest, as an integer of 0..255"


def _affine_fault(result: Any, right: Any, low: float, high: float) -> str:
    """Return what is wrong with a scale and zero point, or ""; many pairs cover the range."""
    (scale, zero), low, high = (float(part) for part in result), min(low, 0.0), max(high, 0.0)
    gave = f"gave ({scale:g}, {zero:g}): "
    if scale == int(scale) and zero != int(zero):
        return f"{gave}give the scale first, then the zero point; "
    if not scale > 0 or not np.isfinite(scale):
        return f"{gave}the scale must be positive, also for a range of nothing; "
    if zero != int(zero) or not 0 <= zero <= 255:
        return f"{gave}the zero point must be an integer of 0..255; "
    reach, spare = ((0 - zero) * scale, (255 - zero) * scale), 0.51 * scale
    if 0.5 + 1e-6 < abs(zero + low / scale) < 1:
        return f"{gave}{-low / scale:.3f} rounds to another zero point: round to the nearest; "
    if reach[0] > low + spare or reach[1] < high - spare:
        return f"{gave}it reaches from {reach[0]:.4g} to {reach[1]:.4g}: "
    too_wide = scale > 1.001 * (high - low) / 255 and high > low
    return f"{gave}the scale is wider than needed: the range has 255 steps from low to high; " if too_wide else ""


def quantize_rows(weights: Any) -> tuple[Any, Any]:
    return _quantize(weights)


def _quantize(weights: Any, steps: int = 127, rounding: Any = np.rint, largest: Any = None) -> tuple[Any, Any]:
    """Quantize rows with another number of steps, rounding, or largest value per row: common mistakes."""
    rows = weights.reshape(len(weights), -1)
    reach = np.abs(rows).max(1) if largest is None else largest(rows)
    scale = np.where(reach > 0, reach / steps, 1.0)
    codes = rounding(weights / _broadcast(scale, weights.ndim))
    return np.clip(codes, -128, 127).astype(np.int8), scale


def _broadcast(scale: Any, ndim: int) -> Any:
    return np.asarray(scale).reshape(-1, *[1] * (ndim - 1))


_OWN = "divide by the row's own largest magnitude / 127, and round to the nearest"


def _rows_fault(result: Any, right: Any, weights: Any) -> str:
    """Return what is wrong with int8 codes and scales, or ""; scales may be slightly larger than needed."""
    q, scale = result
    if q.dtype != np.int8:
        other = "give q first, then the scales; " if scale.dtype == np.int8 else ""
        return f"gave {q.dtype}, not int8, so nothing got smaller: {other}"
    if q.shape != weights.shape:
        return f"gave q of the shape {q.shape}: it must have the weights' shape {weights.shape}; "
    if scale.shape not in (weights.shape[:1], weights.shape[:1] + (1,) * (weights.ndim - 1)):
        return f"gave scales of shape {scale.shape}: one for each row weights[i] was asked for; "
    if not np.isfinite(scale).all() or not (scale > 0).all():
        return "gave a scale that is not positive: a row of zeros still needs a positive scale, such as 1; "
    if int(np.abs(q.astype(int)).max()) > 127:
        return "used -128, which has no positive partner: the largest magnitude is 127 steps; "
    axes = tuple(range(1, weights.ndim))
    error = np.abs(q * _broadcast(scale, weights.ndim) - weights).max(axis=axes)
    limit = np.abs(weights).max(axis=axes) / 254 * 1.001
    worst = int((error - limit).argmax())
    if error[worst] <= limit[worst] + 1e-12:
        return ""
    return f"is off by {error[worst]:.3g} in row {worst}, and half a step is {limit[worst]:.3g}: "


def _shared_scale(weights: Any) -> tuple[Any, Any]:
    scale = np.full(len(weights), np.abs(weights).max() / 127)
    return np.rint(weights / _broadcast(scale, weights.ndim)).astype(np.int8), scale


def _row_cases() -> list[Example]:
    """Return test inputs for `quantize_rows`, with a remark on what is special about each."""
    rng = np.random.default_rng(0)
    cases = []
    for shape in ((4, 8), (3, 5), (5, 5), (16, 3, 3, 3)):
        weights = rng.standard_normal(shape) * _broadcast(rng.uniform(0.01, 10, shape[0]), len(shape))
        weights[0] = 0
        weights[1] = np.abs(weights[1]) * -1
        cases.append(Example((weights,), "for weights of a convolution" if len(shape) > 2 else ""))
    return cases


_MAGNITUDE = "the largest magnitude counts, so that of negative weights too (np.abs)"


def integer_product(x: Any, zero_point: int, w: Any) -> Any:
    return ((x.astype(np.int64) - zero_point) @ w.astype(np.int64)).astype(np.int32)


def _product_fault(result: Any, right: Any, *args: Any) -> str:
    """Return what is wrong with an integer product: its dtype, or a value; "" if nothing is."""
    if result.shape != right.shape:
        return f"gave the shape {result.shape}, and {right.shape} is right: "
    if np.array_equal(result, right):
        return "" if result.dtype == np.int32 else f"gave {result.dtype}: accumulate in int32 and give int32; "
    index = np.unravel_index(int(np.abs(result.astype(np.float64) - right).argmax()), right.shape)
    return f"gave {result[index]} at {tuple(map(int, index))}, and {right[index]} is right: "


def _product_cases() -> list[Example]:
    """Return test inputs for `integer_product`, with a remark on what is special about each."""
    rng = np.random.default_rng(1)
    cases = []
    about = {128: "", 0: "for zero_point = 0", 255: "for sums beyond 16 bits", 1: "for sums beyond float32's 24 bits"}
    # Where all numbers are large, sums need more bits than float32 has.
    for m, k, n, zero, smallest in (
        (5, 300, 7, 128, 0),
        (2, 3, 4, 0, 0),
        (1, 2000, 3, 255, 0),
        (2, 2001, 3, 1, 101),
        (3, 4, 3, 77, 0),
    ):
        x = rng.integers(smallest, 256, (m, k), dtype=np.uint8)
        w = rng.integers(smallest or -127, 128, (k, n), dtype=np.int8)
        x[0, :3], w[:, 0] = 255, 127
        cases.append(Example((x, zero, w), about.get(zero, "for square w")))
    return cases


def _in_type(dtype: Any, subtract_in: Any = np.int64) -> Any:
    """Return an `integer_product` function that computes in another dtype: a common mistake."""

    def product(x: Any, zero: int, w: Any) -> Any:
        return (x.astype(subtract_in) - np.asarray(zero).astype(subtract_in)).astype(dtype) @ w.astype(dtype)

    return product


_AWAY = "take zero_point * (sum of each column of w) away"
_BITS = "float32 holds 24 bits, too few for this sum: multiply integers"


EXERCISES = (
    Exercise(
        "affine",
        "scale and zero point of a range",
        differential(
            affine,
            lambda: [
                Example((low, high), about)
                for low, high, about in (
                    (-0.35, 10.0, ""),
                    (-0.33, 10.0, ""),
                    (-1.0, 1.0, "for a symmetric range"),
                    (-7.0, 1.0, "for a range that is mostly negative"),
                    (0.0, 6.0, "where low is 0"),
                    (2.0, 6.0, "where zero is outside of low and high"),
                    (-5.0, -1.0, "where zero is outside of low and high"),
                    (0.0, 0.0, "for a range of nothing"),
                )
            ],
            _WIDEN,
            fault=_affine_fault,
        ),
    ),
    Exercise(
        "quantize_rows",
        "weights as int8, with a scale for each channel",
        differential(quantize_rows, _row_cases, f"q * scale must be near: {_OWN}", fault=_rows_fault),
    ),
    Exercise(
        "integer_product",
        "a product of integers, the zero point taken into account",
        differential(
            integer_product,
            _product_cases,
            f"widen to int32 before multiplying, and {_AWAY}",
            fault=_product_fault,
            tolerance=0,
        ),
    ),
)
