"""Where a plan's values lie: where earlier ones were, in their input's place, in the memory of a whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tilewise import nn
from tilewise._extension import native
from tilewise.graph.ir import Op
from tilewise.quantize import QuantizedModel
from tilewise.quantize.calibration import trace_and_calibrate
from tilewise.quantize.lowering import tied_values
from tilewise.quantize.mixed_precision import with_int16_residuals
from tilewise.quantize.operators import QuantizedMultiply
from tilewise.quantize.parameters import INT16_MAX, AffineParameters, QuantizedArray, image_values, round_up
from tilewise.tensor import Tensor

pytestmark = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")


def quantized(model: nn.Module, x: np.ndarray, share: float) -> QuantizedModel:
    graph, calibration, *_ = trace_and_calibrate(model.eval(), [x], "minmax")
    rng = np.random.default_rng(7)
    return QuantizedModel(
        graph,
        calibration,
        {},
        int16_reasons=with_int16_residuals(
            graph, {f: "drawn" for f in set(tied_values(graph)) if rng.random() < share}
        ),
    )


class Head(nn.Module):
    """Much in an image, so that images are run one by one, and then layers on little, of which many are run at once."""

    def __init__(self, hidden: int, rng: np.random.Generator) -> None:
        super().__init__()
        self.conv, self.act, self.pool = nn.Conv2d(3, 48, 3, padding=1, rng=rng), nn.ReLU(), nn.MaxPool2d(8)
        self.gate, self.sigmoid = nn.Conv2d(48, 48, 1, rng=rng), nn.Sigmoid()
        self.mix = nn.Conv2d(48, 48, 1, rng=rng)
        self.first, self.second = (nn.Conv2d(48, 48, 3, padding=1, rng=rng) for _ in range(2))
        self.along = nn.Conv2d(48, 48, 5, 2, 2, 48, rng=rng)
        self.up, self.down = nn.Linear(48, hidden, rng=rng), nn.Linear(hidden, 5, rng=rng)

    def forward(self, x: Any) -> Any:
        x = self.pool(self.act(self.conv(x)))
        x = x * self.sigmoid(self.gate(x.mean((2, 3), keepdims=True)))
        x = self.mix(x) + x
        x = x + self.second(self.act(self.first(x)))
        return self.down(self.act(self.up(self.act(self.along(x)).mean((2, 3)))))


@pytest.mark.parametrize("hidden, images", [(50, 7), (12_000, 50)])  # the second in several parts
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_layers_on_small_images_are_run_for_many_of_them_at_once(
    share: float, hidden: int, images: int, settings_restored: Any
) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((images, 3, 48, 40)).astype(np.float32)
    q = quantized(Head(hidden, rng), x[:2], share)
    expected = np.concatenate([q.run(x[i : i + 1], lambda _, value: None) for i in range(images)])
    for isa in native.supported_isas():
        native.set_isa(isa)
        for threads in (1, 3):
            native.set_num_threads(threads)
            for count in (images, 3, images - 1):  # memory of a batch is kept for smaller ones
                np.testing.assert_array_equal(q.run(x[:count]), expected[:count], err_msg=f"{isa}, {threads} threads")


class ReadAgain(nn.Module):
    """A gated value, and a layer that reads the value from before the gate: the gate must not be applied in place."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__()
        self.first, self.gate, self.second, self.third = (
            nn.Conv2d(channels, 32, 1, rng=rng) for channels in (3, 32, 32, 32)
        )
        self.relu, self.sigmoid = nn.ReLU(), nn.Sigmoid()

    def forward(self, x: Any) -> Any:
        x = self.relu(self.first(x))
        gated = self.second(x * self.sigmoid(self.gate(x.mean((2, 3), keepdims=True))))
        return self.third(x) + gated


def test_a_value_that_is_read_again_is_not_replaced_in_place(settings_restored: Any) -> None:
    x = np.random.default_rng(0).standard_normal((3, 3, 9, 7)).astype(np.float32)
    q = quantized(ReadAgain(np.random.default_rng(1)), x, 1.0)
    expected = q.run(x, lambda _, value: None)
    for isa in native.supported_isas():
        native.set_isa(isa)
        np.testing.assert_array_equal(q.run(x), expected, err_msg=isa)


class ScaledMean(nn.Module):
    """A scale, the mean of each channel, and a 1x1 convolution: the mean is a row that the convolution reads through a
    view, at the point where the plan is split into two batch stages."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, outputs, 1, rng=np.random.default_rng(3))

    def forward(self, x: Any) -> Any:
        mean = (x * 1.5).mean((2, 3))
        return self.conv(mean.reshape((-1, mean.shape[1], 1, 1)))


@pytest.mark.parametrize("channels, side", [(96, 7), (112, 7), (256, 7), (256, 3), (256, 4)])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_plan_is_split_where_a_view_is_read(channels: int, side: int, share: float, settings_restored: Any) -> None:
    x = np.random.default_rng(channels).standard_normal((4, channels, side, side)).astype(np.float32)
    model = ScaledMean(channels, 256).eval()
    q = quantized(model, x, share)
    expected = q.run(x, lambda _, value: None)
    assert np.abs(expected - model(Tensor(x)).data).max() < 0.03 * np.abs(expected).max()
    for isa in native.supported_isas():
        native.set_isa(isa)
        for count in (1, 4):
            np.testing.assert_array_equal(q.run(x[:count]), expected[:count], err_msg=isa)


@pytest.mark.parametrize("channels", [1, 7, 16, 17, 40, 512, 530, 1040])
@pytest.mark.parametrize("wide_gate", [True, False])
@pytest.mark.parametrize("border", [0, 1])
def test_gates_are_fractions(channels: int, wide_gate: bool, border: int, settings_restored: Any) -> None:
    rng = np.random.default_rng(channels)
    a = AffineParameters(0.001, 0, INT16_MAX)
    gate = AffineParameters(1 / 20_000, 0, 20_000) if wide_gate else AffineParameters(1 / 255, 0)
    for output in (AffineParameters(0.0011, 0, INT16_MAX), AffineParameters(0.01, 0, 4095)):
        mul = QuantizedMultiply(output, border)
        pixels = rng.integers(-INT16_MAX, INT16_MAX + 1, (2, 3, 5, round_up(channels))).astype(np.int16)
        gates = rng.integers(0, gate.largest + 1, (2, 1, 1, round_up(channels)))
        inputs = [
            QuantizedArray(pixels, a, channels),
            QuantizedArray(gates.astype(np.int16 if wide_gate else np.uint8), gate, channels),
        ]
        assert mul._fraction([a, gate]) > 0
        want = image_values(mul(*inputs))
        real = image_values(inputs[0]) * a.scale * (image_values(inputs[1]) * gate.scale) / output.scale
        assert np.abs(np.clip(real, -output.int16_limit, output.int16_limit) - want).max() <= 1.01
        plan = native.Graph()
        values = [plan.dynamic_input(str(g.data.dtype), False, channels) for g in inputs]
        plan.output(mul.add_to(plan, values, [a, gate]))
        for isa in native.supported_isas():
            native.set_isa(isa)
            actual = plan.run([g.data for g in inputs])[0]
            inside = actual[:, border : border + 3, border : border + 5, :channels]
            np.testing.assert_array_equal(inside, want, err_msg=isa)


def test_a_gate_that_may_be_more_than_1_is_no_fraction() -> None:
    a, gate = AffineParameters(0.001, 0, INT16_MAX), AffineParameters(1 / 10_000, 0, 20_000)
    assert QuantizedMultiply(AffineParameters(0.001, 0, INT16_MAX))._fraction([a, gate]) == 0
    assert (
        QuantizedMultiply(AffineParameters(0.002, 0, INT16_MAX))._fraction([a, gate]) == 0
    )  # 1 is one too many of 32767
    assert QuantizedMultiply(AffineParameters(0.0021, 0, INT16_MAX))._fraction([a, gate]) > 0
    assert (
        QuantizedMultiply(AffineParameters(0.0021, 0, INT16_MAX), op=Op("mul", (), (), activation="silu"))._fraction(
            [a, gate]
        )
        == 0
    )
    assert QuantizedMultiply(AffineParameters(0.0021, 3))._fraction([a, gate]) == 0
