"""Saturation-safe weights: int8 weights whose products cannot saturate AVX2's 16-bit sums.

AVX2 without VNNI multiplies bytes with `vpmaddubsw`, which adds two products in 16 bits and saturates. A
convolution's weights get the smallest scales with which no such sum can overflow for any activations: the sum of a
pair of neighbouring channels or, where the reduction is long, of two pairs, which are then converted to 32 bits
together. That costs less than one bit of the weights. A layer that was loaded with its own integers may exceed the
limit; its activations are then split and the excess is multiplied separately. The integers equal those of every other
instruction set either way. `GptqRounding` rounds the convolutions of a model with the statistics of calibration images.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tilewise.graph.ir import Array, Op
from tilewise.quantize.gptq import inverse_factor, round_columns
from tilewise.quantize.graph import FloatGraph
from tilewise.quantize.parameters import QuantizedWeights, broadcast_scale, checked_weights, rounded_weights

_LARGEST_ACTIVATION, _LARGEST_SUM = 255, 32767
_GROUP = 4  # channels that are stored next to each other: two pairs
_MAX_CHANNELS = 2048  # arbitrary; the second moments of an input take this many squared floats
_LONG_SUM = 128  # products in a sum; shorter sums are as fast with single pairs


def largest_sums(weights: Array, products: int) -> Array:
    """Return each filter's worst-case 16-bit partial sum (O,) for weights (O, kh, kw, C) on AVX2.

    It is the largest sum of weights of one sign among `products` weights that the instruction adds up: 2 neighbouring
    channels, or 4, the same pair in two adjacent groups of four channels.
    """
    rows, kh, kw, channels = weights.shape
    padded = np.zeros((rows, kh, kw, -(-channels // _GROUP) * _GROUP), weights.dtype)
    padded[..., :channels] = weights
    run = padded.reshape(rows, kh, -1)
    lanes = np.zeros((rows, kh, -(-run.shape[2] // (2 * _GROUP)) * 2 * _GROUP), weights.dtype)
    lanes[..., : run.shape[2]] = run
    grouped = lanes.reshape(rows, -1, 2, 2, 2)  # (O, two groups, group, pair of a group, neighbour)

    def largest(weights: Array) -> Array:
        """Return the largest sum of `products` non-negative weights for each filter."""
        sums = weights[..., 0] + weights[..., 1]  # (O, two groups, group, pair)
        if products == 4:
            sums = sums[:, :, 0] + weights[:, :, 1, :, 0] + weights[:, :, 1, :, 1]
        return np.asarray(sums.reshape(rows, -1).max(1, initial=0))

    # Activations are not negative, so the worst case meets only weights of one sign.
    return np.maximum(largest(np.maximum(grouped, 0)), largest(np.maximum(-grouped, 0)))


def saturation_safe_weights(weights: Array) -> QuantizedWeights:
    """Round weights (O, C, kh, kw) to int8 so that their products cannot overflow 16 bits."""
    weights = checked_weights(weights)
    products = 4 if weights[0].size >= _LONG_SUM else 2
    largest = largest_sums(weights.transpose(0, 2, 3, 1).astype(np.float64), products)
    # Each weight may be rounded up by a half.
    return rounded_weights(weights, largest, _LARGEST_SUM // _LARGEST_ACTIVATION - products // 2)


def gptq_weights(weights: Array, moments: Array) -> QuantizedWeights:
    """Round weights (O, C, kh, kw) to saturation-safe int8 by GPTQ, with the second moments (C, C) of its inputs.

    Taps of a filter are treated as independent: only channels of the same tap compensate for each other.
    """
    plain = saturation_safe_weights(weights)
    outputs, channels = weights.shape[:2]
    products = 4 if weights[0].size >= _LONG_SUM else 2
    if products == 4 and weights.shape[3] > 1 and channels % (2 * _GROUP):
        return plain  # a 16-bit sum would contain weights of two taps
    # (O, C, kh kw) to rows (O kh kw, C), in units of the scales
    steps = (weights / broadcast_scale(plain.scale, weights.ndim)).reshape(outputs, channels, -1).transpose(0, 2, 1)
    rows = _WeightRows(steps.reshape(-1, channels).astype(np.float32), products)
    round_columns(rows.steps, inverse_factor(moments, channels), rows.round_column)
    q = rows.q.reshape(outputs, -1, channels).transpose(0, 2, 1).reshape(weights.shape)
    return replace(plain, q=np.ascontiguousarray(q))


class _WeightRows:
    """Rounds rows of weights, in units of their scale, channel by channel without 16-bit overflow."""

    def __init__(self, steps: Array, products: int) -> None:
        """Start rounding rows of weights (O, C) in units of their scale, with all 16-bit sums at zero."""
        self.steps, self.products = steps, products
        self.pruned = steps == 0  # zeros stay zeros, so that a pruned model stays pruned
        self.q = np.zeros(steps.shape, np.int8)
        sums = (-(-steps.shape[1] // (2 * _GROUP)) * 2 * _GROUP // products, len(steps))
        self.up, self.down = np.zeros(sums, np.float32), np.zeros(sums, np.float32)

    def round_column(self, channel: int, column: Array) -> Array:
        """Round one channel's column (O,) so that no 16-bit sum with the channels already rounded can overflow."""
        group, pair = divmod(channel // 2, 2)
        at = channel // 2 if self.products == 2 else group // 2 * 2 + pair
        up, down = self.up[at], self.down[at]
        limit = _LARGEST_SUM // _LARGEST_ACTIVATION
        rounded: Array = np.clip(np.rint(column), np.maximum(down - limit, -127), np.minimum(limit - up, 127))
        rounded[self.pruned[:, channel]] = 0
        up += np.maximum(rounded, 0)
        down += np.maximum(-rounded, 0)
        self.q[:, channel] = rounded
        return rounded


def overflowing_channels(weights: Array, products: int = 2) -> int:
    """Count the filters of weights (O, kh, kw, C) for which a sum of `products` products may overflow 16 bits."""
    largest = largest_sums(weights.astype(np.int64), products)
    return int((largest * _LARGEST_ACTIVATION > _LARGEST_SUM).sum())


def avx2_products(weights: Array) -> str:
    """Describe how a layer with weights (O, kh, kw, C) multiplies on AVX2 without VNNI."""
    if not overflowing_channels(weights, 4):
        return "quads, saturation-safe"
    unsafe = overflowing_channels(weights)
    return f"split activations: {unsafe} of {len(weights)} channels" if unsafe else "pairs, saturation-safe"


# --- GPTQ for all convolutions of a model ---


class GptqRounding:
    """Rounds the weights of a graph's convolutions on demand, and caches them for all candidate models."""

    def __init__(self, graph: FloatGraph, x: Array) -> None:
        """Run the float model on `x` to collect second moments of the layers' inputs."""
        sources = {s.inputs[0] for s in graph.steps if _is_plain(s)}
        self.moments: dict[int, Array] = {}
        self._cache: dict[int, tuple[Array, QuantizedWeights]] = {}
        graph.run(x, lambda i, result: self._observe(i, result) if i in sources else None)

    def _observe(self, index: int, result: Array) -> None:
        """Store the second moments between the channels of operator `index`'s result (N, C, H, W)."""
        if result.ndim == 4 and result.shape[1] <= _MAX_CHANNELS:
            self.moments[index] = _channel_moments(np.moveaxis(result, 1, 0).reshape(result.shape[1], -1))

    def weights(self, index: int, step: Op, by: Array | None) -> QuantizedWeights | None:
        """Return the GPTQ-rounded weights of an operator, whose input has equalization scales `by`.

        None if its input was not observed or it is not an ungrouped convolution.
        """
        moments = self.moments.get(step.inputs[0])
        if moments is None or step.weight is None or not _is_plain(step):
            return None
        cached = self._cache.get(index)
        if cached is None or not np.array_equal(cached[0], step.weight):
            # Equalization multiplies the channels by `by`, so their moments by both scales.
            scaled = moments if by is None else moments * by * by[:, None]
            cached = step.weight, gptq_weights(step.weight, scaled)
            self._cache[index] = cached
        return cached[1]


def _is_plain(step: Op) -> bool:
    """Tell whether an operator is an ungrouped convolution, in which all input channels add up to each output."""
    return step.kind == "conv" and step.groups == 1


def _channel_moments(values: Array) -> Array:
    """Return the second moments (C, C) of channels (C, values) around their means.

    Bias correction accounts for the means. With few values per channel the moments between channels are unreliable and
    are shrunk towards zero.
    """
    channels, count = values.shape
    centred = values - values.mean(1, keepdims=True, dtype=np.float64).astype(np.float32)
    moments: Array = (centred @ centred.T).astype(np.float64) / count
    variances = np.diag(moments).copy()
    moments *= count / (count + channels)
    np.fill_diagonal(moments, variances)
    return moments
