"""Checks of the quantization lesson: a range that holds zero, a scale for each channel, and a product of integers."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.learn.checking import Exercise
from tilewise.learn.differential import Example, Mistakes, differential


def affine(low: float, high: float) -> tuple[float, int]:
    return _unwidened(min(low, 0.0), max(high, 0.0))


def _unwidened(low: float, high: float) -> tuple[float, int]:
    scale = (high - low) / 255 or 1.0
    return scale, round(-low / scale)


_WIDEN = "the range must hold low, high and zero in 255 steps, and the zero point is round(-low / scale)"


def _affine_fault(result: Any, right: Any, low: float, high: float) -> str:
    """Return what is wrong with a scale and zero point, or ""; many pairs cover the range."""
    (scale, zero), low, high = (float(part) for part in result), min(low, 0.0), max(high, 0.0)
    gave = f"gave ({scale:g}, {zero:g}): "
    if scale == int(scale) and zero != int(zero):
        return f"{gave}give the scale first, then the zero point; "
    if not scale > 0 or not np.isfinite(scale):
        return f"{gave}the scale must be positive, also for a range of nothing; "
    if scale > 1.001 * (high - low) / 255 and high > low:
        return f"{gave}the scale is wider than needed: the range has 255 steps from low to high; "
    if zero != int(zero) or not 0 <= zero <= 255:
        return f"{gave}the zero point must be an integer of 0..255; "
    reach, spare = ((0 - zero) * scale, (255 - zero) * scale), 0.51 * scale
    if 0.5 + 1e-4 < abs(zero + low / scale) < 1:
        return f"{gave}{-low / scale:.3f} rounds to another zero point: round to the nearest; "
    if reach[0] > low + spare or reach[1] < high - spare:
        return f"{gave}it reaches from {reach[0]:.4g} to {reach[1]:.4g}: "
    return ""


def _draw_range(rng: np.random.Generator) -> tuple[float, float]:
    low, high = np.sort(rng.standard_normal(2)) * 10 ** rng.uniform(-3, 3)
    return float(low), float(high)


def quantize_rows(weights: Any) -> tuple[Any, Any]:
    reach = np.abs(weights.reshape(len(weights), -1)).max(1)
    scale = np.where(reach > 0, reach / 127, 1.0)
    return np.rint(weights / _broadcast(scale, weights.ndim)).astype(np.int8), scale


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


def _draw_rows(rng: np.random.Generator) -> tuple[Any]:
    """Draw weights of a layer or a convolution, in float32 or float64."""
    shape = rng.integers(1, 7, rng.choice((2, 4)))
    weights = rng.standard_normal(shape) * _broadcast(10 ** rng.uniform(-3, 2, shape[0]), len(shape))
    return (weights.astype(rng.choice(("float32", "float64"))),)


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


def _draw_bytes(rng: np.random.Generator) -> tuple[Any, int, Any]:
    m, k, n = rng.integers(1, 40, 3)
    x, w = rng.integers(0, 256, (m, k), dtype=np.uint8), rng.integers(-127, 128, (k, n), dtype=np.int8)
    return x, int(rng.integers(0, 256)), w


_AWAY = "take zero_point * (sum of each column of w) away"
MISTAKES: dict[str, Mistakes] = {
    "affine": [
        ("low and high may be on one side of zero", _unwidened),
        (
            "uint8 is 0..255: the zero point is not shifted by 128",
            lambda low, high: (affine(low, high)[0], affine(low, high)[1] - 128),
        ),
    ],
    "integer_product": [
        ("the zero point is added", lambda x, zero_point, w: (x.astype(int) + zero_point) @ w.astype(int)),
        (
            "float32 holds 24 bits, too few for this sum: multiply integers",
            lambda x, zero_point, w: (x.astype(np.float32) - np.float32(zero_point)) @ w.astype(np.float32),
        ),
        ("the sums do not fit into int16", lambda x, zero_point, w: integer_product(x, zero_point, w).astype(np.int16)),
        (
            "uint8 has no negative numbers: widen to int32, then subtract",
            lambda x, zero_point, w: (x - np.uint8(zero_point)).astype(int) @ w.astype(int),
        ),
        (
            "zero_point belongs to x alone: w has none",
            lambda x, zero_point, w: (x.astype(int) - zero_point) @ (w.astype(int) - zero_point),
        ),
    ],
}

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
            _draw_range,
            _WIDEN,
            fault=_affine_fault,
            mistakes=MISTAKES["affine"],
        ),
    ),
    Exercise(
        "quantize_rows",
        "weights as int8, with a scale for each channel",
        differential(quantize_rows, _row_cases, _draw_rows, f"q * scale must be near: {_OWN}", fault=_rows_fault),
    ),
    Exercise(
        "integer_product",
        "a product of integers, the zero point taken into account",
        differential(
            integer_product,
            _product_cases,
            _draw_bytes,
            f"widen to int32 before multiplying, and {_AWAY}",
            fault=_product_fault,
            tolerance=0,
            mistakes=MISTAKES["integer_product"],
        ),
    ),
)
