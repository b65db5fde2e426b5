"""Transposed convolutions run as sub-pixel convolutions inside the native call and give the module's numbers."""

from __future__ import annotations

import numpy as np
import pytest

from tilewise import Tensor, nn, no_grad
from tilewise._extension import native
from tilewise.plan import compile

pytestmark = pytest.mark.skipif(native is None, reason="plans are native")

GEOMETRIES = [
    (4, 2, 1, 0),
    (3, 2, 1, 1),
    (4, 1, 0, 0),
    (2, 2, 0, 0),
    (5, 3, 2, 1),
    (3, 1, 1, 0),
    ((1, 4), (1, 2), (0, 1), 0),
    (6, 3, 2, 1),
    (5, 3, 1, 0),
]
SIZES = [(7, 6, 7), (20, 5, 3), (17, 1, 1), (16, 1, 4)]  # output channels, height and width


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tail", ["none", "norm", "shared"])
def test_a_transposed_convolution_is_one_native_call(
    geometry: tuple[int, ...], size: tuple[int, int, int], tail: str
) -> None:
    (kernel, stride, padding, extra), (out, height, width) = geometry, size

    class Upsampler(nn.Module):
        def __init__(self) -> None:
            self.up = nn.ConvTranspose2d(5, out, kernel, stride, padding, extra, rng=0)
            self.norm = nn.BatchNorm2d(out)
            rng = np.random.default_rng(1)
            self.norm.weight.data[:] = rng.uniform(0.5, 2, out)
            self.norm.running_mean[:] = rng.standard_normal(out)
            self.last = nn.Conv2d(out, 3, 3, padding=1, rng=2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            if tail == "none":
                return self.last(y)
            z = self.norm(y).relu()
            return self.last(z) if tail == "norm" else self.last(z) + self.last(y)

    module, x = Upsampler().eval(), np.random.default_rng(3).standard_normal((2, 5, height, width), dtype=np.float32)
    plan = compile(module, x)
    with no_grad():
        expected = module(Tensor(x)).data
    np.testing.assert_allclose(plan(x), expected, atol=2e-5 * np.abs(expected).max())
    assert plan.native_calls == 1
