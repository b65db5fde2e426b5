"""The report says how AVX2 multiplies a layer's bytes, and calls no channel safe that could overflow."""

from __future__ import annotations

import itertools

import numpy as np

from tilewise import nn
from tilewise.quantize import quantize
from tilewise.quantize.pairs import overflowing_channels


def overflows(row: np.ndarray) -> bool:
    """By trying the four extreme pairs of activations."""
    padded = np.append(row, 0) if len(row) % 2 else row
    sums = [a * int(p) + b * int(q) for p, q in padded.reshape(-1, 2) for a, b in itertools.product((0, 255), repeat=2)]
    return max(sums) > 32767 or min(sums) < -32768


def test_channels_are_proven_as_trying_proves_them() -> None:
    rng = np.random.default_rng(0)
    for channels in (1, 2, 5, 8):
        for most in (10, 64, 65, 127):
            weights = rng.integers(-most, most + 1, (40, 1, 1, channels), dtype=np.int8)
            assert overflowing_channels(weights) == sum(overflows(w.reshape(-1)) for w in weights)
    assert overflowing_channels(np.full((3, 1, 1, 2), 64, np.int8)) == 0  # 255 * 128 = 32640
    assert overflowing_channels(np.array([[[[64, 65]]]], np.int8)) == 1
    assert overflowing_channels(np.array([[[[-128, 127]]]], np.int8)) == 0


def test_the_report_names_the_way_of_every_product() -> None:
    apart = nn.Conv2d(4, 6, 1, rng=0)  # weights of one sign in no pair: proven
    apart.weight.data[:] = np.array([1, -1, 1, -1], np.float32)[None, :, None, None]
    together = nn.Conv2d(6, 8, 3, padding=1, rng=1)
    together.weight.data[0] = 1.0  # two of the largest side by side
    depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, rng=2)
    model = nn.Sequential(apart, nn.ReLU(), together, nn.ReLU(), depthwise, nn.MaxPool2d(2), nn.Flatten()).eval()
    x = np.random.default_rng(0).standard_normal((2, 4, 6, 6)).astype(np.float32)
    ways = {step.name: step.avx2 for step in quantize(model, [x]).report()}
    assert ways["0"] == "pairs, proven"
    assert ways["2"].startswith("split activations: ") and ways["2"].endswith(" of 8 channels")
    assert ways["4"] == "16-bit products"
    assert ways["5"] == ""
