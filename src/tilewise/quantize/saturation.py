"""Saturation-safe weights: int8 weights whose products cannot saturate AVX2's 16-bit sums.

AVX2 without VNNI multiplies bytes with `vpmaddubsw`, which adds two products in 16 bits and saturates. A
convolution's weights get the smallest scales with which no such sum can overflow for any activations: the sum of a
pair of neighbouring channels or, where the reduction is long, of two pairs, which are then converted to 32 bits
together. That costs less than one bit of the weights. A layer that was loaded with its own integers may exceed the
limit; its activations are then split and the excess is multiplied separately. The integers equal those of every other
instruction set either way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.quantize.gptq import inverse_factor, round_columns
from tilewise.quantize.parameters import QuantizedWeights, checked_weights, rounded_weights, spread

Array = npt.NDArray[Any]
_LARGEST_ACTIVATION, _LARGEST_SUM = 255, 32767
_GROUP = 4  # channels that are stored next to each other: two pairs
_LONG = 128  # products in a sum; shorter sums are as fast with single pairs


def largest_sums(weights: Array, products: int) -> Array:
    """Of weights (O, kh, kw, C): the largest sum of one sign among `products` weights that meet in 16 bits, a channel.

    2: a pair of neighbours; 4: the same pairs of two groups of four that follow each other in a row of the filter.
    """
    rows, kh, kw, channels = weights.shape
    padded = np.zeros((rows, kh, kw, -(-channels // _GROUP) * _GROUP), weights.dtype)
    padded[..., :channels] = weights
    run = padded.reshape(rows, kh, -1)
    lanes = np.zeros((rows, kh, -(-run.shape[2] // (2 * _GROUP)) * 2 * _GROUP), weights.dtype)
    lanes[..., : run.shape[2]] = run
    grouped = lanes.reshape(rows, -1, 2, 2, 2)  # (O, two groups, group, pair of a group, neighbour)

    def largest(weights: Array) -> Array:
        sums = weights[..., 0] + weights[..., 1]  # (O, two groups, group, pair)
        if products == 4:
            sums = sums[:, :, 0] + weights[:, :, 1, :, 0] + weights[:, :, 1, :, 1]
        return np.asarray(sums.reshape(rows, -1).max(1, initial=0))

    most: Array = np.maximum(largest(np.maximum(grouped, 0)), largest(np.maximum(-grouped, 0)))
    return most


def saturation_safe_weights(given: Array) -> QuantizedWeights:
    """Weights (O, C, kh, kw) as int8 whose products cannot overflow 16 bits."""
    weights = checked_weights(given)
    products = 4 if weights[0].size >= _LONG else 2
    most = largest_sums(weights.transpose(0, 2, 3, 1).astype(np.float64), products)
    # Each of them may be rounded up by a half.
    return rounded_weights(weights, most, _LARGEST_SUM // _LARGEST_ACTIVATION - products // 2)


def gptq_weights(given: Array, moments: Array) -> QuantizedWeights:
    """The same, rounded by `moments` (C, C) of the channels that are read: those still to be rounded make up for the
    errors of those before, within what the sums leave them. Taps are taken for unrelated."""
    plain = saturation_safe_weights(given)
    outputs, channels = given.shape[:2]
    products = 4 if given[0].size >= _LONG else 2
    if products == 4 and given.shape[3] > 1 and channels % (2 * _GROUP):
        return plain  # sums of two taps
    steps = (given / spread(plain.scale, given.ndim)).reshape(outputs, channels, -1).transpose(0, 2, 1)
    rows = _Rows(steps.reshape(-1, channels).astype(np.float32), products)
    round_columns(rows.steps, inverse_factor(moments, channels), rows.round_column)
    q = rows.q.reshape(outputs, -1, channels).transpose(0, 2, 1).reshape(given.shape)
    return replace(plain, q=np.ascontiguousarray(q))


class _Rows:
    """Rows of weights, in steps, that are rounded channel by channel, and what their sums come to."""

    def __init__(self, steps: Array, products: int) -> None:
        self.steps, self.products = steps, products
        self.pruned = steps == 0  # which stay zeros: a pruned model is one still
        self.q = np.zeros(steps.shape, np.int8)
        sums = (-(-steps.shape[1] // (2 * _GROUP)) * 2 * _GROUP // products, len(steps))
        self.up, self.down = np.zeros(sums, np.float32), np.zeros(sums, np.float32)

    def round_column(self, channel: int, column: Array) -> Array:
        group, pair = divmod(channel // 2, 2)
        at = channel // 2 if self.products == 2 else group // 2 * 2 + pair
        up, down = self.up[at], self.down[at]
        most = _LARGEST_SUM // _LARGEST_ACTIVATION
        rounded: Array = np.clip(np.rint(column), np.maximum(down - most, -127), np.minimum(most - up, 127))
        rounded[self.pruned[:, channel]] = 0
        up += np.maximum(rounded, 0)
        down += np.maximum(-rounded, 0)
        self.q[:, channel] = rounded
        return rounded


def overflowing_channels(weights: Array, products: int = 2) -> int:
    """Of weights (O, kh, kw, C): channels with a sum of so many products that might not fit into 16 bits."""
    most = largest_sums(weights.astype(np.int64), products)
    return int((most * _LARGEST_ACTIVATION > _LARGEST_SUM).sum())


def avx2_products(weights: Array) -> str:
    """How a layer with weights (O, kh, kw, C) multiplies on AVX2 without VNNI."""
    if not overflowing_channels(weights, 4):
        return "quads, proven"
    unsafe = overflowing_channels(weights)
    return f"split activations: {unsafe} of {len(weights)} channels" if unsafe else "pairs, proven"
