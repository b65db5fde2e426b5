"""Convolutions that run a band of rows at a time, more lying between them than the cache holds: the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tilewise import nn
from tilewise._environment import MachineOverride
from tilewise._extension import native
from tilewise.quantize import QuantizedModel
from tilewise.quantize.calibration import trace_and_calibrate
from tilewise.quantize.lowering import tied_values
from tilewise.quantize.mixed_precision import with_int16_residuals

pytestmark = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")


class Block(nn.Module):
    """Up, along and down again, with what came in added where it fits."""

    def __init__(self, channels: int, inner: int, kernel: int, stride: int, rng: np.random.Generator) -> None:
        self.up = nn.Conv2d(channels, inner, 1, rng=rng)
        self.along = nn.Conv2d(inner, inner, kernel, stride, kernel // 2, inner, rng=rng)
        self.down = nn.Conv2d(inner, channels, 1, rng=rng)
        self.act, self.adds = nn.SiLU(), stride == 1

    def forward(self, x: Any) -> Any:
        out = self.down(self.act(self.along(self.act(self.up(x)))))
        return x + out if self.adds else out


def network(seed: int) -> nn.Module:
    rng = np.random.default_rng(seed)
    plain = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, rng=rng), nn.ReLU(), nn.Conv2d(16, 20, 3, 1, 1, rng=rng), nn.ReLU())
    blocks = [
        Block(20, 40 + 4 * seed, kernel, stride, rng) for kernel, stride in ((3, 1), (5, 2), (7, 1), (3, 2), (3, 1))
    ]
    return nn.Sequential(plain, *blocks).eval()


def quantized(model: nn.Module, x: np.ndarray, share: float, seed: int) -> QuantizedModel:
    graph, calibration, *_ = trace_and_calibrate(model, [x], "minmax")
    rng = np.random.default_rng(seed)
    wide = with_int16_residuals(graph, {f: "drawn" for f in set(tied_values(graph)) if rng.random() < share})
    return QuantizedModel(graph, calibration, {}, int16_reasons=wide)


@pytest.mark.parametrize("size", [(61, 46), (8, 200), (2, 3)])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_bands_give_the_numbers_of_whole_images(
    seed: int,
    share: float,
    size: tuple[int, int],
    settings_restored: Any,
    another_machine: Callable[[MachineOverride], None],
) -> None:
    x = np.random.default_rng(seed).standard_normal((3, 3, *size)).astype(np.float32)
    model = network(seed)
    expected, isa_before = None, native.isa()
    for l2 in (1 << 30, 1 << 19, 1 << 14, 1 << 11):  # nothing is banded; then more and more, at last row by row
        another_machine(MachineOverride(l2=l2))
        native.set_isa(isa_before)  # calibration's floats differ by instruction set and threads
        native.set_num_threads(1)
        q = quantized(model, x, share, seed)
        for isa in native.supported_isas():
            native.set_isa(isa)
            for threads in (1, 3):
                native.set_num_threads(threads)
                output = q.run(x)
                expected = output if expected is None else expected
                np.testing.assert_array_equal(output, expected, err_msg=f"{l2}, {isa}, {threads} threads")
                np.testing.assert_array_equal(q.run(x[:1]), expected[:1])
