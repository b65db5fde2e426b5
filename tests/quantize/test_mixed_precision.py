"""Activations of 16 bits: the same numbers on every instruction set as in NumPy, and as many as an error asks for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tilewise.onnx
from tilewise import nn
from tilewise._extension import native
from tilewise.errors import ConfigurationError, FileFormatError
from tilewise.io import load_arrays, save
from tilewise.models import zoo
from tilewise.quantize import QuantizedModel, load_quantized, quantize, save_quantized
from tilewise.quantize.calibration import EvaluatedBatch, trace_and_calibrate
from tilewise.quantize.graph import FloatGraph, trace
from tilewise.quantize.layers import QuantizedConv2d, integer_offset
from tilewise.quantize.lowering import tied_values
from tilewise.quantize.mixed_precision import (
    ActivationSensitivity,
    _try_fewer,
    assign_precision,
    normalized_max_error,
    with_int16_residuals,
)
from tilewise.quantize.operators import output_stage
from tilewise.quantize.parameters import INT16_MAX, AffineParameters, affine_from_range, int16_weights
from tilewise.quantize.plan import Segment
from tilewise.tensor import cat

needs_native = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")


def inputs(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def some_wide(graph: FloatGraph, share: float, seed: int) -> dict[int, str]:
    rng = np.random.default_rng(seed)
    return with_int16_residuals(graph, {f: "drawn" for f in set(tied_values(graph)) if rng.random() < share})


def with_wide(model: nn.Module, x: np.ndarray, share: float, seed: int = 0) -> QuantizedModel:
    graph, calibration, *_ = trace_and_calibrate(model.eval(), [x], "minmax")
    return QuantizedModel(graph, calibration, {}, int16_reasons=some_wide(graph, share, seed))


def assert_numbers_are_numpys(q: QuantizedModel, x: np.ndarray) -> None:
    assert not q.float_reasons
    expected = q.run(x, lambda _, value: None)
    for isa in native.supported_isas():
        native.set_isa(isa)
        for threads in (1, 3):
            native.set_num_threads(threads)
            np.testing.assert_array_equal(q.run(x), expected, err_msg=f"{isa}, {threads} threads")
    np.testing.assert_array_equal(q.run(x[1:]), expected[1:])


@needs_native
@pytest.mark.parametrize("share", [1.0, 0.4])
@pytest.mark.parametrize(
    "name", ["mobilenet_v2", "mobilenet_v3", "efficientnet_b0", "shufflenet_v2", "squeezenet", "unet"]
)
def test_networks_with_some_activations_in_16_bits(name: str, share: float, settings_restored: Any) -> None:
    x = inputs(2, 3, 32, 48)
    q = with_wide(zoo.ZOO[name](), x, share, seed=len(name))
    assert q.int16_reasons and len(q._segments) == 1 and isinstance(q._segments[0], Segment)
    assert_numbers_are_numpys(q, x)


class Odd(nn.Module):
    """Sizes that fill no vector, and every kind of step."""

    def __init__(self, channels: int, groups: int, stride: int, activation: str) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.grouped = nn.Conv2d(channels, channels, 3, stride=stride, padding=2, groups=groups, dilation=2)
        self.depth = nn.Conv2d(channels, channels, 5, padding=2, groups=channels)
        self.norm = nn.BatchNorm2d(channels)
        self.down = nn.Conv2d(2 * channels, channels + 1, 1)
        self.last = nn.Linear(channels + 1, 7)
        self.activation = {"relu": nn.ReLU(), "gelu": nn.GELU(), "leaky": nn.LeakyReLU(0.2)}[activation]

    def forward(self, x: Any) -> Any:
        x = self.activation(self.first(x))
        a = self.activation(self.grouped(x))
        b = self.depth(a) + a
        joined = cat([self.norm(b), a], 1)
        return self.last(self.down(joined).mean((2, 3)))


@needs_native
@pytest.mark.parametrize("activation", ["relu", "gelu", "leaky"])
@pytest.mark.parametrize(
    "channels, groups, stride", [(1, 1, 1), (5, 1, 2), (6, 3, 1), (17, 17, 2), (34, 2, 1), (24, 8, 2)]
)
def test_odd_layers(channels: int, groups: int, stride: int, activation: str, settings_restored: Any) -> None:
    x = inputs(3, 3, 11, 9, seed=channels)
    for share in (1.0, 0.5):
        q = with_wide(Odd(channels, groups, stride, activation), x, share, seed=channels)
        assert_numbers_are_numpys(q, x)


@needs_native
@pytest.mark.parametrize(
    "activation", ["", "relu", "relu6", "hard_swish", "silu", "sigmoid", "hard_sigmoid", "gelu", "leaky_relu 0.01"]
)
@pytest.mark.parametrize("wide_in, wide_out", [(9000, INT16_MAX), (INT16_MAX, 0), (0, 4095), (4095, 12000)])
def test_layers_of_every_activation_and_width(
    activation: str, wide_in: int, wide_out: int, settings_restored: Any
) -> None:
    rng = np.random.default_rng(4)
    low, high = affine_from_range(-2.0, 6.0), affine_from_range(-1.0, 3.0)
    input_parameters, result_parameters = (
        p.to_int16(1.5, most) if most else p for p, most in ((high, wide_in), (low, wide_out))
    )
    for channels, columns, taps, groups in [
        (3, 5, 3, 1),
        (16, 24, 1, 1),
        (20, 40, 3, 1),
        (24, 24, 3, 24),
        (12, 18, 2, 3),
        (48, 48, 5, 48),
        (37, 37, 3, 37),
        (16, 16, 7, 16),
        (33, 33, 2, 33),
    ]:
        weight = rng.standard_normal((columns, channels // groups, taps, taps)).astype(np.float32)
        padding, bias = (taps // 2, taps // 2), rng.standard_normal(columns).astype(np.float32)
        for skip in (None, input_parameters, result_parameters):
            if skip is not None and skip.is_int16 and not wide_out:
                continue
            settings = (input_parameters, result_parameters, (1, 1), padding, False, skip)
            layer = QuantizedConv2d.from_weights(weight, bias, *settings, activation=activation, groups=groups)
            assert_layer_is_numpys(layer, channels, skip, rng)


@needs_native
@pytest.mark.parametrize("taps", [(1, 7), (7, 1), (3, 5), (5, 3), (2, 3), (4, 1), (6, 2)])
def test_depthwise_layers_whose_windows_are_no_squares(taps: tuple[int, int], settings_restored: Any) -> None:
    rng = np.random.default_rng(sum(taps))
    result_parameters, reach = affine_from_range(-2.0, 6.0).to_int16(1.5, 9000), max(taps) // 2
    for input_parameters in (affine_from_range(-1.0, 3.0), affine_from_range(-1.0, 3.0).to_int16(1.5, INT16_MAX)):
        for channels in (5, 16, 40):
            weight = rng.standard_normal((channels, 1, *taps)).astype(np.float32)
            bias = rng.standard_normal(channels).astype(np.float32)
            settings = (input_parameters, result_parameters, (1, 1), (reach, reach), False, None)
            layer = QuantizedConv2d.from_weights(weight, bias, *settings, activation="silu", groups=channels)
            assert_layer_is_numpys(layer, channels, None, rng)


def numbers(rng: np.random.Generator, shape: tuple[int, ...], p: AffineParameters) -> np.ndarray:
    lowest, highest = p.limits
    return rng.integers(lowest, highest + 1, shape).astype(np.int16 if p.is_int16 else np.uint8)


def assert_layer_is_numpys(
    layer: QuantizedConv2d, channels: int, skip: AffineParameters | None, rng: np.random.Generator
) -> None:
    from tilewise.quantize.parameters import QuantizedArray, round_up

    border, size = max(layer.geometry.padding), 6 + channels % 9
    plan = native.Graph()
    x = numbers(rng, (2, size, size, round_up(channels)), layer.input)
    arrays = [QuantizedArray(x, layer.input, channels).with_padding(border)]
    values = [plan.dynamic_input(str(x.dtype), False, channels, border, layer.input.zero_point)]
    if skip is not None:
        side = size + 2 * layer.geometry.padding[0] - layer.kernel.weights().shape[1] + 1
        added = numbers(rng, (2, side, side, round_up(layer.out_channels)), skip)
        arrays.append(QuantizedArray(added, skip, layer.out_channels))
        values.append(plan.dynamic_input(str(added.dtype), False, layer.out_channels, 0, skip.zero_point))
    plan.output(layer.add_to(plan, values, [a.parameters for a in arrays]))
    want = layer(*arrays).data[..., : layer.out_channels]
    for isa in native.supported_isas():
        native.set_isa(isa)
        computed = plan.run([a.data for a in arrays])[0][..., : layer.out_channels]
        np.testing.assert_array_equal(computed, want, err_msg=isa)


@pytest.mark.parametrize("kind", ["bell", "equal", "one", "zeros", "large bias"])
@pytest.mark.parametrize("most", [255, 4095, INT16_MAX])
@pytest.mark.parametrize("k", [1, 27, 1000, 20000])
def test_sums_of_16_bit_products_stay_within_32_bits(k: int, kind: str, most: int) -> None:
    rng = np.random.default_rng(k)
    weight = {
        "bell": rng.standard_normal((4, k)),
        "equal": np.ones((4, k)),
        "one": np.eye(4, k),
        "zeros": np.zeros((4, k)),
    }
    w = weight.get(kind, rng.standard_normal((4, k)) * 1e-6).astype(np.float32)
    bias = np.full(4, 30.0 if kind == "large bias" else 0.5, np.float32)
    p = AffineParameters(0.001, 0, most)
    result_parameters = int16_weights(w, bias, p)
    q = result_parameters.q.astype(np.int64)
    steps = np.abs(np.rint(bias / (result_parameters.scale.astype(np.float64) * p.scale)))
    assert (np.abs(q).sum(1) * most + steps < 2**31).all()
    integer_offset(
        result_parameters.q, bias, p.scale * result_parameters.scale.astype(np.float64), p
    )  # raises where they do not


def test_as_many_bits_as_the_error_asks_for() -> None:
    x = inputs(1, 3, 64, 64)
    model = zoo.ZOO["mobilenet_v2"]().eval()
    exact = trace(model, x).run(x)
    sizes = []
    for bound in (0.5, 0.02, 0.004):
        q: Any = quantize(model, [x], max_error=bound)
        assert np.abs(q.run(x) - exact).max() <= bound * np.abs(exact).max()
        sizes.append(len(q.int16_reasons))
    assert sizes[0] == 0 < sizes[1] <= sizes[2]
    bytes_only: Any = quantize(model, [x], max_error=None)
    assert {r.form for r in bytes_only.report()} == {"int8"}
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigurationError, match="max_error"):
            quantize(model, [x], max_error=bad)


@pytest.mark.parametrize("name, size", [("mobilenet_v2", 64), ("shufflenet_v2", 64), ("unet", 64)])
def test_most_images_that_were_not_calibrated_on_keep_the_bound(name: str, size: int) -> None:
    model = zoo.ZOO[name](seed=1).eval()
    x, fresh = inputs(4, 3, size, size), inputs(32, 3, size, size, seed=1)
    exact = trace(model, fresh).run(fresh)
    narrow: Any = quantize(model, [x], max_error=None)
    bound = 0.6 * normalized_max_error(narrow.run(fresh), exact)
    q: Any = quantize(model, [x], max_error=bound)
    assert q.int16_reasons
    each = [np.abs(r - e).max() / np.abs(e).max() for r, e in zip(q.run(fresh), exact, strict=True)]
    assert np.quantile(each, 0.8) <= bound
    assert max(each) <= 1.5 * bound


def test_an_error_is_that_of_the_worst_image_or_of_as_many_as_may_come() -> None:
    exact, error = np.full((4, 500), 2.0), inputs(4, 500) * np.float32(0.01)
    exact[3], error[3] = 0.5, error[3] * 2
    worst = normalized_max_error(exact + error, exact)
    assert worst == pytest.approx(normalized_max_error(exact[3:] + error[3:], exact[3:]))
    assert worst >= np.abs(error[3]).max() / 0.5
    even = inputs(4, 500) * np.float32(0.01)
    few, many = (normalized_max_error(2 + even, np.full_like(even, 2), images) for images in (4, 64))
    assert few < many < 1.3 * few
    of_64 = inputs(64, 500, seed=1) * np.float32(0.01)
    assert np.abs(of_64).max() / 2 < many
    assert normalized_max_error(exact[:0], exact[:0], 32) == 0


def test_fewer_are_taken_where_they_keep_the_bound_by_luck() -> None:
    class Off:
        def __init__(self, count: int) -> None:
            self.count = count

        def run(self, x: np.ndarray) -> np.ndarray:
            return x + np.float32(0.003 if self.count in (10, 8) else 0.1)

    exact = np.ones((32, 10), np.float32)
    observations = EvaluatedBatch(exact, exact)
    assert _try_fewer(Off(10), 10, Off, observations, 0.02).count == 8
    assert _try_fewer(Off(12), 12, lambda _: Off(0), observations, 0.02).count == 12
    assert _try_fewer(Off(0), 0, Off, observations, 0.02).count == 0


@pytest.mark.parametrize("required_count, expected", [(9, 10), (5, 5)])
def test_all_activations_are_int16_where_nearly_all_need_it(required_count: int, expected: int) -> None:
    """The last int8 activations save little time, but saturated on unseen images of RepGhostNet."""

    class Converted:
        def __init__(self, reasons: dict[int, str], _: object) -> None:
            self.count = len(reasons)

        def run(self, x: np.ndarray) -> np.ndarray:
            return x + np.float32(0.003 if self.count >= required_count else 0.1)

    exact = np.ones((32, 10), np.float32)
    images, graph = EvaluatedBatch(exact, exact), trace(nn.ReLU(), exact)
    sensitivities = [ActivationSensitivity(group, 0.1, 0.1, 1.0) for group in range(10)]
    search: Any = SimpleNamespace(
        check=images, few_images=images, graph=graph, rounding=None, sensitivities=sensitivities
    )
    assert assign_precision(search, 0.02, Converted).count == expected


def test_what_is_one_number_a_channel_has_room_for_images_that_differ() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3, rng=0), nn.ReLU(), nn.GlobalAvgPool(), nn.Linear(16, 4, rng=1)).eval()
    x = inputs(1, 3, 16, 16)
    reach = []
    for images in (x, np.repeat(x, 16, 0)):
        calibration = trace_and_calibrate(model, [images], "minmax")[1]
        pooled = next(i for i, shape in enumerate(calibration.shapes) if shape == (16,))
        picture = next(i for i, shape in enumerate(calibration.shapes) if shape == (16, 14, 14))
        observations: list[np.ndarray] = []
        trace(model, x).run(x, lambda _, result, observations=observations: observations.append(result))
        assert calibration.ranges[picture][1] == observations[picture].max()
        assert calibration.ranges[0] == (x.min(), x.max())
        reach.append(calibration.ranges[pooled][1] / observations[pooled].max())
    assert reach == pytest.approx([1.125, 1.03125], rel=1e-3)
    q: Any = quantize(model, [x], max_error=None)
    brighter = 1.1 * x  # the pooled values are as much larger, the others' ends seldom matter
    exact = trace(model, brighter).run(brighter)
    assert np.abs(q.run(brighter) - exact).max() <= 0.02 * np.abs(exact).max()


def test_a_file_says_how_far_16_bits_reach_and_how_finely(tmp_path: Path) -> None:
    q = with_wide(zoo.ZOO["squeezenet"](), inputs(2, 3, 32, 32), 1.0)
    save_quantized(q, tmp_path / "wide.safetensors")
    assert load_quantized(tmp_path / "wide.safetensors").affine == q.affine
    arrays, metadata = load_arrays(tmp_path / "wide.safetensors")
    facts = json.loads(metadata["model"])
    stored_numbers = facts["numbers"]
    group = next(iter(stored_numbers))
    bad: list[Any] = [{}, None, {**stored_numbers, "0": [1.0]}, {group: stored_numbers[group]}]
    bad += [
        {**stored_numbers, group: pair}
        for pair in ([0.0, 4095], [float("nan"), 4095], ["far", 9], [1.0, 0], [1.0, 40000])
    ]
    for numbers in bad:
        facts["numbers"] = numbers
        save(arrays, tmp_path / "other.safetensors", {**metadata, "model": json.dumps(facts)})
        with pytest.raises(FileFormatError, match="does not fit together"):
            load_quantized(tmp_path / "other.safetensors")


def test_the_report_says_which_and_why_and_a_file_keeps_them(tmp_path: Path) -> None:
    x = inputs(2, 3, 48, 48)
    q: Any = quantize(zoo.ZOO["shufflenet_v2"]().eval(), [x], max_error=0.005)
    wide = [r for r in q.report() if r.form == "int16"]
    assert wide and all("%" in r.reason or "16 bits" in r.reason for r in wide)
    assert any(r.avx2 == "16-bit products" for r in q.report() if r.kind == "conv")
    save_quantized(q, tmp_path / "wide.safetensors")
    again = load_quantized(tmp_path / "wide.safetensors")
    np.testing.assert_array_equal(again.run(x), q.run(x))
    assert again.int16_reasons == q.int16_reasons


def test_huge_inputs_and_nan_are_clamped() -> None:
    x = inputs(2, 3, 32, 32)
    q = with_wide(zoo.ZOO["squeezenet"](), x, 1.0)
    strange = x.copy()
    strange[0, 0, :4] = [[np.nan], [np.inf], [-1e30], [1e30]]
    computed = q.run(strange)
    assert np.isfinite(computed).all()
    np.testing.assert_array_equal(computed, q.run(strange, lambda _, value: None))


def test_onnx_has_16_bits_too(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    x = inputs(2, 3, 48, 48)
    q = with_wide(zoo.ZOO["mobilenet_v2"](), x, 1.0)
    tilewise.onnx.save(q, tmp_path / "wide.onnx")
    file = onnx.load(tmp_path / "wide.onnx")
    onnx.checker.check_model(file)
    assert file.opset_import[0].version == 21
    theirs = onnxruntime.InferenceSession(str(tmp_path / "wide.onnx")).run(None, {"input": x})[0]
    ours = q.run(x)
    assert np.abs(theirs - ours).max() <= 5e-3 * np.abs(ours).max()


def test_activations_use_as_many_of_16_bits_as_their_readers_can_bear() -> None:
    x = inputs(2, 3, 48, 48)
    q = with_wide(zoo.ZOO["efficientnet_b0"](), x, 1.0)
    for index, step in enumerate(q.graph.steps):
        if step.kind not in ("conv", "linear"):
            continue
        operand, layer = q.affine[step.inputs[0]], q.integer[index]
        weights = layer.kernel.weights().astype(np.int64)
        products = weights[0].size
        bent = q.graph.steps[step.inputs[0]].activation == "silu"  # which must reach far enough as well
        assert products > 100 or bent or operand.int16_limit > 8000, "few products leave an activation its bits"
        assert products < 1000 or operand.int16_limit < 8000, "many take them"
        bias = np.abs(layer.offset.astype(np.int64)) if step.kind == "conv" else 0
        assert (np.abs(weights).reshape(len(weights), -1).sum(1) * operand.int16_limit + bias).max() < 2**31


@pytest.mark.parametrize("most", [4095, 9000, 32767])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("largest", [0.05, 0.8, 3.0, 7.0, 60.0, 2000.0])
def test_bent_numbers_are_near_the_activation_and_favour_no_side(largest: float, activation: str, most: int) -> None:
    output = AffineParameters(largest / most, 0, most)
    finish = output_stage(activation, output)
    rng = np.random.default_rng(most)
    x = np.concatenate([rng.normal(0, largest / 4, 20000), rng.normal(0, 2, 20000), np.linspace(-12, 12, 2001)])
    x = x[(x < largest) & (x > -max(largest, 12))].astype(np.float32)
    values = x if finish.takes_real_values else x / np.float32(output.scale / finish.units_per_step)
    computed = finish.requantize(values.astype(np.float32)).astype(np.float64) * output.scale
    exact = x / (1 + np.exp(np.minimum(-x.astype(np.float64), 700)))
    if activation == "gelu":
        exact = x * np.array([0.5 * math.erfc(-each / math.sqrt(2)) for each in x])
    error = computed - np.clip(exact, -largest, largest)
    assert np.abs(error).max() <= 2.5 * output.scale + 8e-4
    assert abs(error.mean()) <= 0.1 * output.scale + 1e-5  # shared by all values, it would add up in sums
