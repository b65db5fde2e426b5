"""Norms in float and subtraction in integers inside one native call of an INT8 model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tilewise.onnx
from tilewise import Tensor, nn
from tilewise._extension import native
from tilewise.nn import functional
from tilewise.quantize import QuantizedModel, load_quantized, quantize, save_quantized

pytestmark = pytest.mark.skipif(native is None, reason="plans are compiled")


class Normed(nn.Module):
    """A convolution, a norm by group or by pixel, the difference of two branches, and a classifier."""

    def __init__(self, norm: str) -> None:
        rng = np.random.default_rng(3)
        self.first, self.second = nn.Conv2d(3, 12, 3, padding=1, rng=rng), nn.Conv2d(12, 12, 3, padding=1, rng=rng)
        self.norm = nn.GroupNorm(3, 12) if norm == "group" else nn.LayerNorm(12)
        self.pool, self.head = nn.AvgPool2d(2), nn.Linear(12 * 16, 5, rng=rng)
        self.flatten = nn.Flatten()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if isinstance(self.norm, nn.GroupNorm):
            normed = self.norm(x)
        else:
            normed = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        difference = functional.relu(self.second(normed)) - normed
        return self.head(self.flatten(self.pool(difference)))


@pytest.fixture(params=["group", "pixel"])
def model_and_images(request: pytest.FixtureRequest) -> tuple[nn.Module, QuantizedModel, np.ndarray]:
    module = Normed(request.param).eval()
    x = np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float32)
    model = quantize(module, [x], max_error=None)
    assert isinstance(model, QuantizedModel)
    return module, model, x


def test_a_norm_between_integer_layers_is_part_of_one_native_call(
    model_and_images: tuple[nn.Module, QuantizedModel, np.ndarray],
) -> None:
    module, model, x = model_and_images
    assert len(model._segments) == 1
    assert {r.form for r in model.report()} == {"int8", "float32"}
    expected = module(Tensor(x)).data
    assert np.abs(model.run(x) - expected).max() < 0.05 * np.abs(expected).max()


def test_steps_one_by_one_give_the_bits_of_the_native_call(
    model_and_images: tuple[nn.Module, QuantizedModel, np.ndarray],
) -> None:
    _, model, x = model_and_images
    try:
        for isa in native.supported_isas():
            for threads in (1, 3):
                native.set_isa(isa)
                native.set_num_threads(threads)
                alone = model.run(x, lambda _index, _value: None)
                np.testing.assert_array_equal(model.run(x), alone, err_msg=isa)
                np.testing.assert_array_equal(model.run(x[2:3]), alone[2:3], err_msg=isa)
    finally:
        native.set_isa(native.supported_isas()[-1])
        native.set_num_threads(1)


def test_a_model_with_norms_is_saved_and_loaded(
    model_and_images: tuple[nn.Module, QuantizedModel, np.ndarray], tmp_path: Path
) -> None:
    _, model, x = model_and_images
    save_quantized(model, tmp_path / "normed.int8")
    np.testing.assert_array_equal(load_quantized(tmp_path / "normed.int8").run(x), model.run(x))


def test_onnx_runtime_runs_a_model_with_norms(
    model_and_images: tuple[nn.Module, QuantizedModel, np.ndarray], tmp_path: Path
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    _, model, x = model_and_images
    tilewise.onnx.save(model, tmp_path / "normed.onnx", x)
    session = onnxruntime.InferenceSession(str(tmp_path / "normed.onnx"), providers=["CPUExecutionProvider"])
    result = session.run(None, {session.get_inputs()[0].name: x})[0]
    expected = model.run(x)
    assert np.abs(result - expected).max() < 0.03 * np.abs(expected).max()
