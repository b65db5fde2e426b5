"""INT8 models: integers all the way, close to float, exact against NumPy, and clear about what they cannot do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tilewise import Tensor, models, nn, no_grad, save
from tilewise._extension import native
from tilewise.errors import ConfigurationError, DtypeError, FileFormatError, GradientError, ShapeError, TilewiseError
from tilewise.quantize import (
    AffineParameters,
    Calibration,
    INT8Quantizer,
    QuantizedConv2d,
    QuantizedLinear,
    calibrate,
    load_quantized,
    quantize,
    save_quantized,
)
from tilewise.quantize import layers as layers_module
from tilewise.quantize.calibration import OBSERVERS, Observer
from tilewise.quantize.graph import trace

RNG = np.random.default_rng(0)


def images(n: int, channels: int = 3, size: int = 32) -> np.ndarray:
    return RNG.standard_normal((n, channels, size, size)).astype(np.float32)


NETWORKS = [(models.resnet8, (3, 32)), (models.vgg6, (3, 32)), (models.cnn, (1, 8))]


# --- weights ---


@pytest.mark.parametrize("per_channel", [True, False])
def test_weights_come_back_within_half_a_step(per_channel: bool) -> None:
    w = RNG.standard_normal((6, 4, 3, 3)).astype(np.float32) * np.array([1e-6, 1, 10, 0, 1e6, 3])[:, None, None, None]
    result = INT8Quantizer(per_channel).quantize_weights(w, RNG.random((5, 4)))
    assert (
        result.q.dtype == np.int8
        and result.scale.shape == ((6,) if per_channel else (1,))
        and not result.zero_point.any()
    )
    step = result.scale.reshape(-1, 1, 1, 1)
    assert (np.abs(result.dequantize() - w) <= step * 0.5001).all()
    assert result.input is not None and result.input.zero_point == 0


@pytest.mark.parametrize("bad", [np.array([np.nan, 1.0]), np.array([np.inf])])
def test_weights_that_are_not_numbers_are_refused(bad: np.ndarray) -> None:
    with pytest.raises(ConfigurationError, match="NaN or infinity"):
        INT8Quantizer().quantize_weights(bad)
    with pytest.raises(DtypeError):
        INT8Quantizer().quantize_weights(np.array([1, 2]))
    with pytest.raises(ShapeError):
        INT8Quantizer().quantize_weights(np.zeros((0, 3)))


# --- observers ---


@pytest.mark.parametrize("method", OBSERVERS)
def test_every_observer_covers_zero_and_most_of_the_data(method: str) -> None:
    observer = Observer()
    for scale in (1.0, 3.0, 0.5):
        observer.observe(RNG.standard_normal(5000) * scale + 1)
    parameters = observer.parameters(method)
    low, high = parameters.dequantize(np.array([0, 255], np.uint8))
    assert low < 0 < high and 0 <= parameters.zero_point <= 255
    assert parameters.dequantize(np.array([parameters.zero_point], np.uint8))[0] == 0


def test_clipping_observers_ignore_a_lone_outlier() -> None:
    observer = Observer()
    observer.observe(np.concatenate([RNG.standard_normal(200_000), [1000.0]]))
    assert observer.parameters("minmax").scale > 3
    assert observer.parameters("percentile").scale < 1
    assert observer.parameters("mse").scale < observer.parameters("minmax").scale


# --- whole models ---


@pytest.mark.parametrize(("make", "shape"), NETWORKS, ids=lambda v: getattr(v, "__name__", ""))
def test_an_int8_model_stays_close_to_the_float_one(make, shape: tuple[int, int]) -> None:
    model, x = make().eval(), images(16, *([shape[0], shape[1]]))
    with no_grad():
        expected = model(Tensor(x)).data
    for observer in ("minmax", "mse"):
        result = quantize(model, [x[:8], Tensor(x[8:])], observer=observer)(Tensor(x)).data
        assert np.abs(result - expected).max() <= 0.1 * np.abs(expected).max()


@pytest.mark.parametrize(("make", "shape"), NETWORKS, ids=lambda v: getattr(v, "__name__", ""))
def test_the_compiled_model_gives_numpys_integers(
    make, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if native is None:
        pytest.skip("the compiled kernels are not built")
    model, x = make().eval(), images(3, *shape)
    calibration = calibrate(model, [x])
    compiled = quantize(model, calibration)
    with monkeypatch.context() as patch:
        patch.setattr(layers_module, "native", None)
        plain = quantize(model, calibration)
        expected: dict[int, np.ndarray] = {}
        plain.run(x, lambda i, v: expected.update({i: v.data}) if hasattr(v, "parameters") else None)
    before = native.isa()
    for isa in native.supported_isas():
        native.set_isa(isa)
        result: dict[int, np.ndarray] = {}
        compiled.run(x, lambda i, v, result=result: result.update({i: v.data}) if hasattr(v, "parameters") else None)
        for index, data in expected.items():
            np.testing.assert_array_equal(result[index], data, err_msg=f"step {index} with {isa}")
    native.set_isa(before)


def test_between_quantized_layers_the_data_stays_in_bytes() -> None:
    model, x = models.resnet8().eval(), images(2)
    q = quantize(model, [x], max_error=None)  # int8 only, whatever the error on these images
    kinds = []
    q.run(x, lambda _, v: kinds.append((v.data if hasattr(v, "parameters") else v).dtype))
    assert set(map(str, kinds[1:-1])) == {"uint8"}


def test_weights_take_a_quarter_of_the_bytes_and_no_float_copy_is_kept() -> None:
    model = models.vgg6().eval()
    dense = sum(p.data.nbytes for p in model.parameters())
    q = quantize(model, [images(1)])
    assert q.nbytes <= 0.27 * dense
    assert all(step.weight is None for step in q.graph.steps)


RESIDENT = """
import gc, sys
from tilewise import load, models
from tilewise.quantize import load_quantized

def resident():
    return 1024 * int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS")).split()[1])

def one():
    if sys.argv[1] == "int8":
        return load_quantized(sys.argv[2])
    model = models.vgg6()
    model.load_state_dict(load(sys.argv[2]))
    return model

held = [one()]
gc.collect()
before = resident()
held += [one() for _ in range(16)]
gc.collect()
print((resident() - before) / 16)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of a process")
def test_a_loaded_model_takes_a_quarter_of_the_resident_memory(tmp_path) -> None:
    model = models.vgg6().eval()
    save(model.state_dict(), tmp_path / "float32")
    save_quantized(quantize(model, [images(1)]), tmp_path / "int8")

    def resident(form: str) -> float:
        command = [sys.executable, "-c", RESIDENT, form, str(tmp_path / form)]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert resident("int8") <= 0.3 * resident("float32")
    assert (tmp_path / "int8").stat().st_size <= 0.27 * (tmp_path / "float32").stat().st_size


@pytest.mark.parametrize(("make", "shape"), NETWORKS, ids=lambda v: getattr(v, "__name__", ""))
def test_a_saved_model_loads_to_the_same_results(make, shape: tuple[int, int], tmp_path) -> None:
    model, x = make().eval(), images(4, *shape)
    first = trace(model, x).steps[1].name
    q = quantize(model, [x], keep_float=[first])
    save_quantized(q, tmp_path / "model.safetensors")
    again = load_quantized(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(again(x).data, q(x).data)
    assert [r.form for r in again.report()] == [r.form for r in q.report()]
    dense = sum(p.data.nbytes for p in model.parameters())
    if make is models.vgg6:
        assert (tmp_path / "model.safetensors").stat().st_size <= 0.28 * dense


def test_a_damaged_file_gets_a_sentence(tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    save_quantized(quantize(models.cnn().eval(), [images(2, 1, 8)]), path)
    whole = path.read_bytes()
    rng = np.random.default_rng(1)
    for _ in range(60):
        damaged = bytearray(whole)
        for at in rng.integers(0, min(len(whole), 4000), 4):
            damaged[at] = rng.integers(256)
        path.write_bytes(bytes(damaged))
        try:
            load_quantized(path)
        except TilewiseError as error:
            assert "\n" not in str(error)
    with pytest.raises(FileFormatError, match="does not hold a quantized model"):
        save({"x": np.zeros(3, np.float32)}, path)
        load_quantized(path)


def test_the_accuracy_criterion_sends_the_noisiest_layers_back_to_float() -> None:
    model, x = models.cnn().eval(), images(32, 1, 8)
    for _, layer in model.named_children():  # one layer whose weights int8 cannot represent well
        if isinstance(layer, nn.Linear):
            layer.weight.data[:, ::2] *= 300
    with no_grad():
        labels = model(Tensor(x)).data.argmax(1)

    def evaluate(candidate) -> float:
        with no_grad():
            return float((candidate(Tensor(x)).data.argmax(1) == labels).mean())

    strict = quantize(model, [x], accuracy_drop=0.0, evaluate=evaluate)
    assert evaluate(strict) == 1.0
    floats = [r for r in strict.report() if r.form == "float32" and r.kind in ("conv", "linear")]
    assert all("dB" in r.reason for r in floats)
    with pytest.raises(ConfigurationError, match="evaluate"):
        quantize(model, [x], accuracy_drop=0.01)


def test_calibration_is_saved_and_reused(tmp_path) -> None:
    model, x = models.cnn().eval(), images(4, 1, 8)
    calibration = calibrate(model, [x], observer="percentile")
    calibration.save(tmp_path / "ranges.json")
    again = Calibration.load(tmp_path / "ranges.json")
    assert again == calibration
    np.testing.assert_array_equal(quantize(model, again)(x).data, quantize(model, calibration)(x).data)
    (tmp_path / "ranges.json").write_text("[1, 2")
    with pytest.raises(FileFormatError, match="is not JSON"):
        Calibration.load(tmp_path / "ranges.json")


# --- what cannot be done ---


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ([], "empty"),
        ([np.full((2, 1, 8, 8), np.nan, np.float32)], "NaN"),
        ([np.zeros(3, np.float32)], "calibration batch"),
        ([np.zeros((2, 5, 8, 8), np.float32)], "cannot apply weights"),
        ([np.zeros((0, 1, 8, 8), np.float32)], "empty"),
        ([np.full((2, 1, 8, 8), 1e300)], "infinity"),
        ([(np.zeros((2, 1, 8, 8)), np.zeros(2))], "has no labels"),
        (["images"], "calibration batch"),
        (None, "iterable of batches"),
    ],
)
def test_useless_calibration_data_gets_a_sentence(data: object, sentence: str) -> None:
    with pytest.raises(TilewiseError, match=sentence):
        quantize(models.cnn().eval(), data)


def test_one_constant_image_still_gives_a_model() -> None:
    model = models.cnn().eval()
    out = quantize(model, [np.zeros((1, 1, 8, 8), np.float32)])(np.zeros((1, 1, 8, 8), np.float32)).data
    with no_grad():
        expected = model(Tensor(np.zeros((1, 1, 8, 8), np.float32))).data
    assert np.abs(out - expected).max() <= 0.1 * max(1, np.abs(expected).max())


def test_quantizing_twice_and_other_shapes_are_refused() -> None:
    q = quantize(models.cnn().eval(), [images(2, 1, 8)])
    with pytest.raises(ConfigurationError, match="already"):
        quantize(q, [images(2, 1, 8)])
    with pytest.raises(ConfigurationError, match="already"):
        quantize(nn.Sequential(q, nn.ReLU()), [images(2, 1, 8)])
    with pytest.raises(ConfigurationError, match="already"):
        quantize(quantize(models.gpt("4x128"), []), [])
    with pytest.raises(ShapeError, match="calibrated on"):
        q(images(2, 3, 8))
    with pytest.raises(DtypeError, match="complex"):
        q(images(2, 1, 8).astype(np.complex64))
    with pytest.raises(ConfigurationError, match="not int"):
        quantize(3, [images(2, 1, 8)])  # type: ignore[arg-type]


class Cubing(nn.Module):
    def forward(self, x):
        return x**3.0


def test_a_layer_without_an_integer_form_stays_in_float_and_says_so() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1, rng=0), Cubing(), nn.Conv2d(8, 8, 3, groups=2, rng=1), nn.ReLU(), nn.Flatten()
    ).eval()
    x = images(3, 4, 6)
    q = quantize(model, [x], max_error=None)
    forms = {r.name: (r.form, r.reason) for r in q.report()}
    assert forms["0"][0] == "int8"
    assert forms["1"] == ("float32", "Pow of inputs (N, 8, 6, 6) has no integer form")
    assert forms["2"][0] == "int8"
    with no_grad():
        expected = model(Tensor(x)).data
    assert np.abs(q(x).data - expected).max() <= 0.05 * np.abs(expected).max()


class Pair(nn.Module):
    def forward(self, x):
        return x, x


class Inside(nn.Module):
    def __init__(self) -> None:
        self.conv, self.linear = nn.Conv2d(2, 2, 3, padding=1, rng=0), nn.Linear(6, 6, rng=1)

    def forward(self, x):
        return self.linear(self.conv(x))


def test_a_module_of_ones_own_gives_one_tensor_and_is_quantized_inside() -> None:
    x = images(2, 2, 6)
    with pytest.raises(ConfigurationError, match="returns a tuple"):
        quantize(nn.Sequential(nn.Conv2d(2, 2, 3, rng=0), Pair()), [x])
    q = quantize(Inside(), [x], max_error=None)
    assert {r.name: r.form for r in q.report()} == {"conv": "int8", "linear": "float32"}
    with no_grad():
        expected = Inside()(Tensor(x)).data
    assert np.abs(q(x).data - expected).max() <= 0.05 * np.abs(expected).max()


@pytest.mark.parametrize("first", [nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Flatten()], ids=["max", "mean", "flatten"])
def test_pooling_the_input_stays_float_and_what_follows_uses_its_own_range(first: nn.Module) -> None:
    after = nn.Linear(3 * 64, 5, rng=0) if isinstance(first, nn.Flatten) else nn.Conv2d(3, 5, 3, rng=0)
    model, x = nn.Sequential(first, after).eval(), images(4, 3, 8)
    q = quantize(model, [x], max_error=None)
    assert [(r.form, r.reason) for r in q.report()] == [("float32", "its inputs are float32"), ("int8", "")]
    with no_grad():
        expected = model(Tensor(x)).data
    assert np.abs(q(x).data - expected).max() <= 0.03 * np.abs(expected).max()


def test_a_channel_of_zeros_keeps_its_bias_exact() -> None:
    conv = nn.Conv2d(3, 6, 3, rng=0)
    conv.weight.data[1::2] = 0
    model, x = nn.Sequential(conv, nn.ReLU(), nn.Conv2d(6, 2, 1, rng=1)).eval(), images(3, 3, 6)
    q = quantize(model, [x], max_error=None)
    values_by_step = {}
    q.run(x, lambda i, v: values_by_step.update({i: v}))
    step = q.calibration.parameters[1].scale
    for channel in (1, 3, 5):
        expected = max(0.0, float(conv.bias.data[channel]))
        by = q.equalization[1][channel]  # its equalization scale
        assert np.abs(values_by_step[1].dequantize()[:, channel] / by - expected).max() <= 0.51 * step


def test_a_range_narrower_than_float32_can_divide_is_still_observed() -> None:
    conv = nn.Conv2d(2, 3, 3, rng=0)
    conv.bias.data[:] = 1e6
    model, x = nn.Sequential(conv, nn.ReLU()).eval(), images(2, 2, 6)
    with no_grad():
        expected = model(Tensor(x)).data
    assert np.abs(quantize(model, [x])(x).data - expected).max() <= 0.01 * expected.max()


def test_sums_that_might_not_fit_into_32_bits_stay_in_float() -> None:
    linear = nn.Linear(70_000, 2, rng=0)
    linear.weight.data[:] = 1.0
    x = np.ones((1, 70_000), np.float32)
    q = quantize(nn.Sequential(linear), [x])
    assert "32 bits" in q.report()[0].reason
    np.testing.assert_allclose(q(x).data, 70_000, rtol=1e-4)


# --- layers by themselves ---


def test_a_quantized_convolution_takes_floats_and_checks_its_residual() -> None:
    conv = nn.Conv2d(3, 5, 3, padding=1, rng=0)
    one = AffineParameters(0.02, 128)
    layer = QuantizedConv2d.from_float(conv, one, AffineParameters(0.03, 100))
    x = np.clip(images(2, 3, 6), -2, 2)
    with no_grad():
        expected = conv(Tensor(x)).data
    assert np.abs(layer(x).dequantize() - expected).max() < 0.1
    with pytest.raises(ConfigurationError, match="residual"):
        layer(x, layer(x))
    grouped = nn.Conv2d(4, 4, 3, groups=2, rng=1)
    x = np.clip(images(2, 4, 6), -2, 2)
    with no_grad():
        expected = grouped(Tensor(x)).data
    result = QuantizedConv2d.from_float(grouped, one, AffineParameters(0.03, 100))(x).dequantize()
    assert np.abs(result - expected).max() < 0.1


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_a_dynamic_linear_layer_stays_close_to_the_float_one(activation: str | None) -> None:
    linear = nn.Linear(37, 21, rng=0)
    layer = QuantizedLinear.from_float(linear)
    x, residual = images(4, 5, 37)[:, :, 0], images(4, 5, 21)[:, :, 0]
    with no_grad():
        expected = linear(Tensor(x), activation=activation, residual=Tensor(residual)).data
        result = layer(Tensor(x), activation=activation, residual=Tensor(residual)).data
    assert np.abs(result - expected).max() <= 0.02 * np.abs(expected).max()
    with pytest.raises(GradientError, match="no gradient"):
        layer(Tensor(x, requires_grad=True))
    with pytest.raises(ShapeError, match="37"):
        layer(x[:, :, :5])


def test_a_transformer_is_quantized_without_data() -> None:
    model = models.gpt("4x128").eval()
    q = quantize(model, [])
    ids = RNG.integers(0, 65, (2, 40))
    with no_grad():
        expected, result = model(ids).data, q(ids).data
    assert np.abs(result - expected).max() <= 0.1 * np.abs(expected).max()
    total_bytes = sum(m.nbytes for m in q.modules() if isinstance(m, QuantizedLinear))
    total_bytes += sum(t.data.nbytes for _, t in q.named_tensors())
    assert total_bytes <= 0.35 * sum(p.data.nbytes for p in model.parameters())


def test_the_repr_counts_the_operators_by_form() -> None:
    x = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
    model = quantize(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), [x])
    forms = sorted(step.form for step in model.report())
    counts = ", ".join(f"{forms.count(form)} {form}" for form in dict.fromkeys(forms))
    assert repr(model) == f"QuantizedModel: {counts} operators, {model.nbytes} bytes of weights"
