"""Cross-layer equalization computes the same network with less rounding noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewise import Tensor, nn, no_grad
from tilewise.nn import Module
from tilewise.quantize import Calibration, calibrate, load_quantized, quantize, save_quantized
from tilewise.quantize.calibration import trace_and_calibrate
from tilewise.quantize.equalization import equalization_scales, equalize
from tilewise.quantize.graph import trace
from tilewise.quantize.lowering import shared_parameters
from tilewise.tensor import cat

RNG = np.random.default_rng(5)


def uneven(conv: nn.Conv2d) -> nn.Conv2d:
    """With output channels of very different sizes."""
    size = 2.0 ** -RNG.integers(0, 5, len(conv.weight.data))
    conv.weight.data *= size[:, None, None, None].astype(np.float32)
    if conv.bias is not None:
        conv.bias.data *= size.astype(np.float32)
    return conv


class Branches(Module):
    """A residual sum, a concatenation, groups, pooling and a linear layer behind them."""

    def __init__(self) -> None:
        self.stem = uneven(nn.Conv2d(3, 8, 3, padding=1, rng=0))
        self.wide = uneven(nn.Conv2d(8, 8, 3, padding=1, groups=8, rng=1))
        self.back = uneven(nn.Conv2d(8, 8, 1, rng=2))
        self.side = uneven(nn.Conv2d(8, 12, 3, padding=1, groups=4, rng=3))
        self.last = uneven(nn.Conv2d(20, 16, 1, rng=4))
        self.relu, self.pool, self.flatten = nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        self.head = nn.Linear(16 * 16, 5, rng=5)

    def forward(self, x: Any) -> Any:
        x = self.relu(self.stem(x))
        y = x + self.back(self.relu(self.wide(x)))
        y = cat([y, self.relu(self.side(y))], 1)
        return self.head(self.flatten(self.pool(self.relu(self.last(y)))))


def images(count: int) -> np.ndarray:
    return RNG.standard_normal((count, 3, 8, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def model() -> Module:
    return Branches().eval()


def test_a_magnified_network_is_the_same_network(model: Module) -> None:
    x = images(4)
    graph, calibration, *_ = trace_and_calibrate(model, [x], "minmax")
    want = graph.run(x)
    by = equalization_scales(graph, calibration, shared_parameters(graph, calibration), ())
    assert max(f.max(initial=1.0) for f in by) > 2 and min(f.min(initial=1.0) for f in by) == 1
    assert (by[0] == 1).all() and (by[-1] == 1).all(), "what comes in and goes out is as it was"
    equalize(graph, by)
    np.testing.assert_allclose(graph.run(x), want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


def test_no_channel_leaves_the_bytes_it_shares(model: Module) -> None:
    x = images(16)
    graph, calibration, *_ = trace_and_calibrate(model, [x], "minmax")
    parameters = shared_parameters(graph, calibration)
    equalize(graph, equalization_scales(graph, calibration, parameters, ()))

    def watch(index: int, result: np.ndarray) -> None:
        p = parameters[index]
        low, high = (-p.zero_point - 0.51) * p.scale, (255.51 - p.zero_point) * p.scale
        assert result.min() >= low and result.max() <= high, graph.steps[index].name

    graph.run(x, watch)


def test_rounding_costs_less(model: Module) -> None:
    calibration_images, unseen = images(32), images(32)
    calibration = calibrate(model, [calibration_images])
    plain = Calibration(*(getattr(calibration, n) for n in list(calibration.__dataclass_fields__)[:-1]))
    with no_grad():
        want = model(Tensor(unseen)).data
    noise = [float(np.square(quantize(model, c)(unseen).data - want).mean()) for c in (calibration, plain)]
    assert noise[0] < 0.9 * noise[1]


def test_a_kept_calibration_gives_the_same_model(model: Module, tmp_path: Path) -> None:
    x = images(3)
    calibration = calibrate(model, [x])
    calibration.save(tmp_path / "ranges.json")
    again = Calibration.load(tmp_path / "ranges.json")
    assert again == calibration
    assert np.array_equal(quantize(model, again)(x).data, quantize(model, [x], max_error=None)(x).data)


def test_reports_compare_with_channels_as_they_were(model: Module, tmp_path: Path) -> None:
    x = images(8)
    q: Any = quantize(model, [x])
    save_quantized(q, tmp_path / "q.safetensors")
    for trained in (q, load_quantized(tmp_path / "q.safetensors")):
        assert all(r.snr_db is not None and r.snr_db > 25 for r in trained.report(x, trace(model, x)))


def test_steps_kept_in_float_give_what_they_gave(model: Module) -> None:
    x = images(8)
    q: Any = quantize(model, [x], keep_float=["stem"])
    assert (q.equalization[1] == 1).all()
    with no_grad():
        want = model(Tensor(x)).data
    assert np.abs(q(x).data - want).max() <= 0.03 * np.abs(want).max()
