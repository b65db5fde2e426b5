"""What quantize promises about its result is checked when it is made, and a broken promise is an exception."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewise import Tensor, nn, no_grad, plan
from tilewise.errors import AccuracyError
from tilewise.graph.ops import NATIVE_OPS
from tilewise.graph.plan import _TraceGuard
from tilewise.graph.trace import run
from tilewise.models import zoo
from tilewise.quantize import QuantizedModel, convert, load_quantized, operators, quantize, save_quantized
from tilewise.quantize.calibration import EvaluatedBatch, trace_and_calibrate
from tilewise.quantize.mixed_precision import STATED_SPREAD_PRIOR, images_to_check, predicted_error, stated_error
from tilewise.quantize.model import dynamic_layer_counts
from tilewise.quantize.plan import Segment
from tilewise.tensor import cat


def inputs(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def small() -> nn.Module:
    rng = np.random.default_rng(5)
    layers = [nn.Conv2d(3, 8, 3, padding=1, rng=rng), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(128, 6, rng=rng)).eval()


def normed() -> nn.Module:
    rng = np.random.default_rng(6)
    conv = [nn.Conv2d(c, 8, 3, padding=1, rng=rng) for c in (3, 8)]
    layers = [conv[0], nn.GroupNorm(2, 8), nn.ReLU(), conv[1], nn.GroupNorm(8, 8), nn.ReLU()]
    return nn.Sequential(*layers, nn.GlobalAvgPool(), nn.Linear(8, 5, rng=rng)).eval()


# --- faults are found ---


def test_rows_in_a_wrong_order_are_an_exception_that_names_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def reversed_row(self: Any, x: Any) -> Any:
        row = operators.QuantizedFlatten.__wrapped_call__(self, x)  # type: ignore[attr-defined]
        return type(row)(row.data[:, ::-1].copy(), row.parameters, row.channels)

    monkeypatch.setattr(
        operators.QuantizedFlatten, "__wrapped_call__", operators.QuantizedFlatten.__call__, raising=False
    )
    monkeypatch.setattr(operators.QuantizedFlatten, "__call__", reversed_row)
    monkeypatch.delattr(operators.QuantizedFlatten, "add_to")  # the native plan leaves it to Python
    with pytest.raises(AccuracyError, match=r"more than max_error=0.01 allows; the first layer beyond it is 3"):
        quantize(small(), [inputs(8, 3, 8, 8)])


def test_a_native_plan_that_gives_other_integers_is_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Segment.run

    def off_by_one(self: Segment, values: dict[int, Any]) -> None:
        run(self, values)
        for index, _ in self.results:
            if isinstance(values[index], np.ndarray):
                values[index] = values[index] * np.float32(1.001)

    monkeypatch.setattr(Segment, "run", off_by_one)
    if any(isinstance(part, Segment) for part in quantized_parts()):
        with pytest.raises(AccuracyError, match="the native plan up to 5"):
            quantize(small(), [inputs(8, 3, 8, 8)], max_error=None)


def quantized_parts() -> list[Any]:
    graph, calibration, _, _ = trace_and_calibrate(small(), [inputs(2, 3, 8, 8)], "minmax", False, 0)
    return QuantizedModel(graph, calibration, {})._segments


def test_a_graph_that_computes_something_else_is_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(NATIVE_OPS["linear"], reference=lambda step, x: 1.01 * (x @ step.weight.T + step.bias))
    monkeypatch.setitem(NATIVE_OPS, "linear", wrong)
    with pytest.raises(AccuracyError, match="Sequential cannot be quantized: traced, it is off by"):
        quantize(small(), [inputs(8, 3, 8, 8)])


def test_a_bound_that_16_bits_cannot_keep_is_an_exception() -> None:
    with pytest.raises(AccuracyError, match="pass more calibration images, a larger max_error"):
        quantize(zoo.ZOO["mobilenet_v2"]().eval(), [inputs(8, 3, 32, 32)], max_error=1e-5)


def test_an_error_above_the_bound_is_a_warning_then_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    conv, relu, pool, flatten, _, linear = small()  # an integer ReLU between float layers would add an error
    model, x, bound = nn.Sequential(conv, relu, pool, flatten, linear).eval(), inputs(16, 3, 8, 8), 1.5e-4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q: Any = quantize(model, [x], max_error=bound)
    assert q.measured_error <= bound <= q.stated_error
    assert any("by it alone, in 16 bits" in reason for reason in q.float_reasons.values())
    monkeypatch.setattr(convert, "_FLOAT_LAYERS", ())
    with pytest.warns(UserWarning, match="more than max_error=0.00015, although"):
        q = quantize(model, [x], max_error=bound)
    assert bound < q.measured_error < 3 * bound
    with pytest.raises(AccuracyError, match="more than max_error=5e-05 allows; the first layer beyond it is"):
        quantize(model, [x], max_error=5e-5)


def test_a_small_sample_widens_the_stated_error_and_is_not_refused(tmp_path: Path) -> None:
    q: Any = quantize(small(), [inputs(1, 3, 8, 8)], max_error=2e-4)
    assert q.measured_error <= 2e-4 < q.stated_error
    save_quantized(q, tmp_path / "model")
    again = load_quantized(tmp_path / "model")
    assert (again.measured_error, again.stated_error) == (q.measured_error, q.stated_error)


# --- images that calibration did not see ---


def test_a_quarter_of_the_images_is_held_out_of_calibration() -> None:
    x = inputs(16, 3, 8, 8)
    x[12:] *= 100
    _, calibration, first, holdout = trace_and_calibrate(small(), [x], "minmax", False, 32)
    assert calibration.samples == len(first.x) == 12 and holdout is not None
    np.testing.assert_array_equal(holdout.x, x[12:])
    assert calibration.ranges[0][1] == x[:12].max()
    with no_grad():
        np.testing.assert_allclose(holdout.result, small()(Tensor(x[12:])).data, rtol=1e-4, atol=1e-2)
    one_by_one = [x[i : i + 1] for i in range(9)]
    _, calibration, _, holdout = trace_and_calibrate(small(), one_by_one, "minmax", False, 32)
    assert calibration.samples == 7 and holdout is not None and len(holdout.x) == 2
    assert trace_and_calibrate(small(), [x[:3]], "minmax", False, 32)[3] is None


def test_few_images_widen_the_predicted_error() -> None:
    exact = np.ones((64, 10), np.float32)
    errors = np.exp(np.random.default_rng(0).normal(np.log(0.01), 0.2, 64))[:, None]
    few, many = (predicted_error(exact[:n] * (1 + errors[:n]), exact[:n]) for n in (4, 64))
    assert np.quantile(errors, 0.95) < many < few < 3 * many
    assert predicted_error(exact[:0], exact[:0]) == 0


@pytest.mark.parametrize("images", [1, 4, 16])
@pytest.mark.parametrize("spread", [0.2, STATED_SPREAD_PRIOR])
def test_the_predicted_error_is_kept_by_95_percent_of_images_with_95_percent_confidence(
    images: int, spread: float
) -> None:
    rng, exact = np.random.default_rng(images), np.ones((images, 1))
    quantile = 0.01 * np.exp(1.645 * spread)  # the error that 95 % of all images keep
    draws = (0.01 * np.exp(rng.normal(0, spread, (images, 1))) for _ in range(400))
    coverage = np.mean([predicted_error(exact + errors, exact, STATED_SPREAD_PRIOR) >= quantile for errors in draws])
    assert coverage >= 0.93  # of 400 draws with a probability of 0.95


def test_mirrored_copies_do_not_count_as_images() -> None:
    """Counted as images, mirrored copies made four images look like sixteen, and too small an error was stated."""
    x = inputs(16, 3, 8, 8)
    graph, calibration, first, holdout = trace_and_calibrate(small(), [x], "minmax", False, 32)
    check = images_to_check(graph, calibration, first, holdout)
    assert (check.independent, len(check.x)) == (4, 4 + 12 + 12)
    four = EvaluatedBatch(check.x[:4], check.result[:4], 4)
    q: Any = quantize(small(), [x])
    assert stated_error(q, check) == stated_error(q, four)
    # Without held-out images, one mirrored copy of each image counts.
    check = images_to_check(graph, calibration, first.first(3), None)
    assert (check.independent, len(check.x)) == (3, 9 + 3)


def test_the_stated_error_is_not_below_the_error_of_a_mirrored_image() -> None:
    x = inputs(16, 3, 8, 8)
    graph, calibration, first, holdout = trace_and_calibrate(small(), [x], "minmax", False, 32)
    check = images_to_check(graph, calibration, first, holdout)
    q: Any = quantize(small(), [x])
    check.result[7] *= 2  # as if a mirrored image saturated
    assert stated_error(q, check) > 0.4


@pytest.mark.parametrize("name", ["mobilenet_v2", "shufflenet_v2", "squeezenet", "resnet18"])
def test_unseen_images_keep_the_bound(name: str) -> None:
    model, x, fresh = zoo.ZOO[name](seed=3).eval(), inputs(16, 3, 32, 32), inputs(60, 3, 32, 32, seed=1)
    with no_grad():
        exact = model(Tensor(fresh)).data
    q: Any = quantize(model, [x], max_error=0.02)
    errors = np.abs(q.run(fresh) - exact).max(1) / np.abs(exact).max(1)
    assert q.measured_error <= 0.02 <= q.stated_error
    assert (errors <= q.stated_error).mean() >= 0.95


def test_16_bits_reach_beyond_the_observed_values() -> None:
    """Equalization scaled channels up to the largest one: other images saturated, and ReLU6 clipped them early."""
    rng = np.random.default_rng(0)
    first, second = nn.Conv2d(3, 16, 1, rng=rng), nn.Conv2d(16, 4, 1, rng=rng)
    model, x = nn.Sequential(first, nn.ReLU6(), second).eval(), inputs(4, 3, 6, 6)
    graph, calibration, _, _ = trace_and_calibrate(model, [x], "minmax", False, 0)
    q = QuantizedModel(graph, calibration, {}, int16_reasons=dict.fromkeys(range(len(graph.steps)), "all"))
    with no_grad():
        exact = model(Tensor(2 * x)).data
    assert np.abs(q.run(2 * x) - exact).max() < 0.002 * np.abs(exact).max()


# --- norms, attention and files ---


def test_a_model_without_an_integer_layer_says_so() -> None:
    model = nn.Sequential(nn.Linear(13, 32, rng=0), nn.GELU(), nn.Linear(32, 7, rng=1)).eval()
    with pytest.warns(UserWarning, match=r"stays float32: 0: Linear of inputs \(N, 6, 13\) has no integer form"):
        quantize(model, [inputs(5, 6, 13)])


@pytest.mark.parametrize("batch", [1, 5])
def test_group_norms_stay_in_float_and_are_saved(batch: int, tmp_path: Path) -> None:
    model, x = normed(), inputs(6, 3, 9, 7)
    q = quantize(model, [x], max_error=0.02)
    assert isinstance(q, QuantizedModel)
    assert q.layer_counts() == (3, 3)
    assert [s.form for s in q.report() if s.kind == "group_norm"] == ["float32"] * 2
    with no_grad():
        exact = model(Tensor(x[:batch])).data
    assert np.abs(q.run(x[:batch]) - exact).max() <= 0.02 * np.abs(exact).max()
    save_quantized(q, tmp_path / "model")
    np.testing.assert_array_equal(load_quantized(tmp_path / "model").run(x[:batch]), q.run(x[:batch]))


class Tokens(nn.Module):
    """A convolution to tokens, a class token, two blocks of attention and layer norm, and a convolution kept in
    float."""

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(2)
        self.patches = nn.Conv2d(3, 32, 4, 4, rng=rng)
        self.token = nn.Parameter(rng.standard_normal((1, 1, 32)).astype(np.float32))
        self.attention, self.norm = nn.MultiHeadAttention(32, 4, rng=rng), nn.LayerNorm(32)
        self.up, self.gelu, self.down = nn.Linear(32, 128, rng=rng), nn.GELU(), nn.Linear(128, 32, rng=rng)
        self.head = nn.Linear(32, 5, rng=rng)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        x = x.reshape((x.shape[0], 32, -1)).transpose(1, 2)
        x = cat([self.token.expand((x.shape[0], 1, 32)), x], 1)
        x = x + self.attention(self.norm(x))
        x = x + self.down(self.gelu(self.up(self.norm(x))))
        return self.head(x[:, 0])


@pytest.mark.filterwarnings("ignore:.*stay in float32")
def test_dynamic_networks_are_saved_planned_and_counted(tmp_path: Path) -> None:
    model, x = Tokens().eval(), inputs(4, 3, 16, 16)
    q = quantize(model, [x])
    with no_grad():
        expected, exact = q(Tensor(x)).data, model(Tensor(x)).data
        assert dynamic_layer_counts(q, x) == (5, 6)  # the convolution stays in float
        save_quantized(q, tmp_path / "model")
        again = load_quantized(tmp_path / "model")
        for images in (x, x[:1], x[:3]):
            np.testing.assert_array_equal(again(Tensor(images)).data, q(Tensor(images)).data)
        save_quantized(again, tmp_path / "again")
        np.testing.assert_array_equal(load_quantized(tmp_path / "again")(Tensor(x)).data, expected)
    assert np.abs(expected - exact).max() < 0.05 * np.abs(exact).max()


@pytest.mark.filterwarnings("ignore:.*stay in float32")
def test_dynamic_networks_are_planned() -> None:
    pytest.importorskip("tilewise._native")
    model, x = Tokens().eval(), inputs(2, 3, 16, 16)
    q = quantize(model, [x])
    with no_grad():
        expected = q(Tensor(x)).data
    np.testing.assert_allclose(plan.compile(q, x)(x), expected, atol=0.02 * np.abs(expected).max())


class Amplifying(nn.Module):
    """A network that makes noise 30,000 times larger, as deep INT8 networks do whose steps are coarse."""

    computes_in_int8 = True

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(15):
            x = 3.9 * x * (1 - x)
        return x


def test_a_plan_may_be_as_far_from_its_network_as_noise_on_the_input_is() -> None:
    model, x = Amplifying().eval(), np.random.default_rng(0).random((2, 40), dtype=np.float32)
    guard = _TraceGuard(model, [x])

    def planned(error: float) -> bool:
        return guard.accepts(lambda arrays: run(model, arrays[0] * np.float32(1 + error)).data, x.shape[:1])

    assert planned(1e-6)
    assert not planned(1e-4)
