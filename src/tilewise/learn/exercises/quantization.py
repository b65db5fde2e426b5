"""Checks of the quantization lesson: a range that holds zero, a scale for each channel, and a product of integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise.learn.checking import Exercise, require, same_array


def _affine(answer: Callable[..., Any]) -> None:
    """Check the exercise `affine`."""
    for low, high in ((-0.35, 10.0), (-0.33, 10.0), (-1.0, 1.0), (0.0, 6.0), (2.0, 6.0), (-5.0, -1.0), (0.0, 0.0)):
        call = f"affine({low}, {high})"
        scale, zero = answer(low, high)
        zero_first = float(scale) == int(scale) and float(zero) != int(zero)
        require(not zero_first, f"{call} gave ({scale}, {zero}): give the scale first, then the zero point")
        require(scale > 0, f"{call} gave the scale {scale}: it must be positive, also for a range of nothing")
        exact = -min(low, 0.0) / scale
        require(
            float(zero) == int(zero) and 0 <= zero <= 255,
            f"{call} gave the zero point {zero}: it is -low / scale as an integer of 0..255",
        )
        require(
            not 0.5 + 1e-6 < abs(zero - exact) < 1,
            f"{call} gave the zero point {zero}, and {exact:.3f} rounds to another: round to the nearest",
        )
        reach = (0 - zero) * scale, (255 - zero) * scale
        spare = 0.51 * scale
        require(
            reach[0] <= min(low, 0) + spare and reach[1] >= max(high, 0) - spare, f"{call} reaches {reach}: {_WIDEN}"
        )
        widest = max(high, 0.0) - min(low, 0.0)
        require(
            scale <= 1.001 * widest / 255 or widest == 0,
            f"{call} gave the scale {scale}, wider than needed: the range has 255 steps from low to high",
        )


_WIDEN = "the range must hold low, high and zero (padding and ReLU write zeros) in 255 steps"


def _per_channel(answer: Callable[..., Any]) -> None:
    """Check the exercise `quantize_rows`."""
    rng = np.random.default_rng(0)
    for shape in ((4, 8), (3, 5), (16, 3, 3, 3)):
        weights = rng.standard_normal(shape) * rng.uniform(0.01, 10, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
        weights[0] = 0
        q, scale = answer(weights)
        call = f"quantize_rows of {shape}"
        require(isinstance(q, np.ndarray) and q.dtype == np.int8, f"{call} did not give int8, so nothing got smaller")
        one_each = np.shape(scale) in (shape[:1], shape[:1] + (1,) * (len(shape) - 1))
        require(one_each, f"{call} gave scales of shape {np.shape(scale)}: one for each row weights[i] was asked for")
        advice = "a channel of zeros still needs a positive scale, such as 1"
        require(
            bool(np.isfinite(scale).all() and (np.asarray(scale) > 0).all()),
            f"{call} gave a scale of 0 or NaN: {advice}",
        )
        require(
            int(np.abs(q.astype(int)).max()) <= 127,
            f"{call} used -128, which has no positive partner: the largest magnitude is 127 steps",
        )
        channel_scale = np.asarray(scale).reshape(-1, *[1] * (len(shape) - 1))
        error = np.abs(q * channel_scale - weights).max(axis=tuple(range(1, len(shape))))
        limit = np.abs(weights).max(axis=tuple(range(1, len(shape)))) / 254 * 1.001
        worst = int((error - limit).argmax())
        feedback = (
            f"{call} is off by {error[worst]:.3g} in channel {worst}, and half a step is {limit[worst]:.3g}: q * scale "
            "must be near, so divide by the channel's own largest magnitude / 127 and round (a cast to int8 truncates)"
        )
        require(bool((error <= limit + 1e-12).all()), feedback)


def _integer_product(answer: Callable[..., Any]) -> None:
    """Check the exercise `integer_product`."""
    rng = np.random.default_rng(1)
    for m, k, n, zero, smallest in ((5, 300, 7, 128, 0), (2, 3, 4, 0, 0), (1, 2000, 3, 255, 0), (2, 2001, 3, 1, 101)):
        x = rng.integers(smallest, 256, (m, k), dtype=np.uint8)
        w = rng.integers(smallest or -127, 128, (k, n), dtype=np.int8)  # large sums need more bits than float32 has
        x[0, :3], w[:, 0] = 255, 127
        result = answer(x, zero, w)
        right = (x.astype(np.int64) - zero) @ w.astype(np.int64)
        call = f"integer_product with {k} terms and zero point {zero}"
        hint = "widen to int32 before multiplying, and take zero_point * (sum of each column of w) away"
        without_zero = x.astype(np.int64) @ w.astype(np.int64)
        rounded = ((x.astype(np.float32) - zero) @ w.astype(np.float32)).astype(np.float64)
        mistakes = (
            (right.astype(np.int8), "the sums do not fit into int8: give them as int32"),
            (without_zero, "the zero point is missing: take zero_point * (sum of each column of w) away"),
            (rounded, "float32 holds 24 bits, too few for this sum: multiply integers"),
            ((x.astype(int) - zero) @ (w.astype(int) - zero), "zero_point belongs to x alone: w has none"),
            ((x - np.uint8(zero)).astype(int) @ w.astype(int), "uint8 has no negative numbers: widen, then subtract"),
        )
        same_array(np.asarray(result, np.float64), right.astype(np.float64), call, hint, 0, mistakes=mistakes)
        require(np.asarray(result).dtype == np.int32, f"{call} gave {np.asarray(result).dtype}: accumulate in int32")


EXERCISES = (
    Exercise("affine", "scale and zero point of a range", _affine),
    Exercise("quantize_rows", "weights as int8, with a scale for each channel", _per_channel),
    Exercise("integer_product", "a product of integers, the zero point taken into account", _integer_product),
)
