"""The report says how AVX2 multiplies a layer's bytes, and calls no channel safe that could overflow."""

from __future__ import annotations

import itertools

import numpy as np

from tilewise import nn
from tilewise.quantize import quantize
from tilewise.quantize.saturation import avx2_products, largest_sums, overflowing_channels, saturation_safe_weights


def overflows(row: np.ndarray) -> bool:
    """By trying the four extreme pairs of activations."""
    padded = np.append(row, 0) if len(row) % 2 else row
    sums = [a * int(p) + b * int(q) for p, q in padded.reshape(-1, 2) for a, b in itertools.product((0, 255), repeat=2)]
    return max(sums) > 32767 or min(sums) < -32768


def test_saturation_safe_channels_never_saturate() -> None:
    rng = np.random.default_rng(0)
    for channels in (1, 2, 5, 8):
        for most in (10, 64, 65, 127):
            weights = rng.integers(-most, most + 1, (40, 1, 1, channels), dtype=np.int8)
            assert overflowing_channels(weights) == sum(overflows(w.reshape(-1)) for w in weights)
    assert overflowing_channels(np.full((3, 1, 1, 2), 64, np.int8)) == 0  # 255 * 128 = 32640
    assert overflowing_channels(np.array([[[[64, 65]]]], np.int8)) == 1
    assert overflowing_channels(np.array([[[[-128, 127]]]], np.int8)) == 0


def test_quads_are_two_groups_of_a_row_of_the_filter() -> None:
    weights = np.zeros((1, 2, 3, 4), np.int8)  # (O, kh, kw, C): three groups a row, of which the first two meet
    weights[0, 0, :, 1] = 40
    weights[0, 1, 0, 0] = 50
    assert largest_sums(weights, 2).tolist() == [50] and largest_sums(weights, 4).tolist() == [80]
    weights[0, 0, 2, 1] = 127
    assert overflowing_channels(weights, 4) == 0
    weights[0, 0, 1, :2] = 60
    assert overflowing_channels(weights, 4) == 1 and overflowing_channels(weights) == 0


def test_quantized_weights_cannot_overflow() -> None:
    rng = np.random.default_rng(0)
    for shape in ((5, 3, 3, 3), (4, 8, 1, 1), (7, 128, 1, 1), (3, 37, 3, 2), (2, 1, 20, 7), (6, 16, 3, 3)):
        for weights in (rng.standard_normal(shape), rng.random(shape), np.ones(shape), np.full(shape, -1e-30)):
            rounded = saturation_safe_weights(weights.astype(np.float32))
            long = weights[0].size >= 128
            assert overflowing_channels(rounded.q.transpose(0, 2, 3, 1), 4 if long else 2) == 0
            assert np.abs(rounded.dequantize() - weights).max() <= rounded.scale.max() * 0.501
    assert saturation_safe_weights(np.ones((1, 2, 1, 1), np.float32)).q.ravel().tolist() == [64, 64]


def test_the_report_names_the_way_of_every_product() -> None:
    apart = nn.Conv2d(4, 6, 1, rng=0)  # weights of one sign in no pair: safe
    apart.weight.data[:] = np.array([1, -1, 1, -1], np.float32)[None, :, None, None]
    together = nn.Conv2d(6, 8, 5, padding=2, rng=1)
    together.weight.data[0] = 1.0  # two of the largest side by side: they become smaller
    depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, rng=2)
    model = nn.Sequential(apart, nn.ReLU(), together, nn.ReLU(), depthwise, nn.MaxPool2d(2), nn.Flatten()).eval()
    x = np.random.default_rng(0).standard_normal((2, 4, 6, 6)).astype(np.float32)
    ways = {step.name: step.avx2 for step in quantize(model, [x], max_error=None).report()}
    assert ways["0"] == "quads, saturation-safe"  # there is but one group
    assert ways["2"] == "quads, saturation-safe"
    assert ways["4"] == "16-bit products"
    assert ways["5"] == ""


def test_weights_that_came_as_integers_may_need_splitting() -> None:
    assert avx2_products(np.full((2, 1, 1, 4), 127, np.int8)) == "split activations: 2 of 2 channels"
    assert avx2_products(np.full((2, 1, 1, 8), 64, np.int8)) == "pairs, saturation-safe"
