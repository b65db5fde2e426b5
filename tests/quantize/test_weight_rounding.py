"""Weights rounded by what they read: results nearer to the exact ones, and sums that still cannot overflow."""

from __future__ import annotations

import numpy as np
import pytest

from tilewise.quantize.saturation import _channel_moments, gptq_weights, overflowing_channels, saturation_safe_weights


def pixels(channels: int, count: int, seed: int = 0) -> np.ndarray:
    """Channels that go together, as those of an image do."""
    rng = np.random.default_rng(seed)
    causes = max(channels // 3, 2)
    mix = np.random.default_rng(channels).standard_normal((channels, causes))
    samples = mix @ rng.standard_normal((causes, count)) + 0.3 * rng.standard_normal((channels, count))
    return np.maximum(samples, 0).astype(np.float32)


def missed(weight: np.ndarray, rounded: np.ndarray, x: np.ndarray) -> float:
    """How far results are off, but for their means, which the bias takes care of."""
    error = np.moveaxis(weight - rounded, 1, -1) @ (x - x.mean(1, keepdims=True))
    return float(np.sqrt(np.square(error).mean()))


@pytest.mark.parametrize("channels, taps", [(3, 3), (24, 1), (58, 1), (128, 1), (16, 3), (64, 3), (12, 3)])
def test_results_are_nearer_than_with_weights_rounded_to_the_nearest(channels: int, taps: int) -> None:
    weight = np.random.default_rng(1).standard_normal((20, channels, taps, taps)).astype(np.float32)
    rounded = gptq_weights(weight, _channel_moments(pixels(channels, 3000)))
    fresh = pixels(channels, 3000, seed=1)
    nearest = saturation_safe_weights(weight)
    assert missed(weight, rounded.dequantize(), fresh) < 0.9 * missed(weight, nearest.dequantize(), fresh)
    np.testing.assert_array_equal(rounded.scale, nearest.scale)


@pytest.mark.parametrize("channels, taps", [(3, 3), (8, 1), (20, 1), (130, 1), (16, 3), (20, 3), (20, 5), (64, 3)])
@pytest.mark.parametrize("kind", ["bell", "equal", "signs", "one large"])
def test_no_sum_can_overflow(channels: int, taps: int, kind: str) -> None:
    rng = np.random.default_rng(2)
    weight = rng.standard_normal((12, channels, taps, taps))
    weight = {"bell": weight, "equal": np.full_like(weight, 0.7), "signs": np.sign(weight)}.get(kind, weight)
    if kind == "one large":
        weight[:, 0] *= 50
    weight = weight.astype(np.float32)
    # All but one and the same input: every error is handed on whole.
    x = np.repeat(pixels(1, 200), channels, 0) + 1e-3 * pixels(channels, 200)
    rounded = gptq_weights(weight, _channel_moments(x)).q.transpose(0, 2, 3, 1)
    assert rounded.dtype == np.int8
    assert overflowing_channels(rounded, 4 if weight[0].size >= 128 else 2) == 0


def test_few_pixels_are_not_believed_more_than_they_know() -> None:
    weight = np.random.default_rng(3).standard_normal((20, 96, 1, 1)).astype(np.float32)
    rounded = gptq_weights(weight, _channel_moments(pixels(96, 12)))
    fresh = pixels(96, 3000, seed=1)
    assert missed(weight, rounded.dequantize(), fresh) < 1.05 * missed(
        weight, saturation_safe_weights(weight).dequantize(), fresh
    )


def test_weights_that_were_pruned_stay_zeros() -> None:
    rng = np.random.default_rng(5)
    weight = rng.standard_normal((24, 64, 3, 3)).astype(np.float32)
    weight[rng.random(weight.shape) < 0.6] = 0
    rounded = gptq_weights(weight, _channel_moments(pixels(64, 3000)))
    assert not rounded.q[weight == 0].any()
    assert np.count_nonzero(rounded.q) > 0.9 * np.count_nonzero(weight)
