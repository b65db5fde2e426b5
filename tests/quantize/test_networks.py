"""The networks people run, in integers from the first convolution to the last: one native call, NumPy's bytes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewise.onnx
from tests.onnx_reference import reference
from tests.passes import assert_passes_allocate_nothing
from tilewise import Tensor, nn, no_grad, plan
from tilewise._extension import native
from tilewise.models import zoo
from tilewise.nn import functional as F
from tilewise.quantize import QuantizedModel, load_quantized, quantize, save_quantized
from tilewise.quantize.plan import Segment
from tilewise.tensor import cat

needs_native = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
CONVOLUTIONAL = [name for name in zoo.ZOO if name not in ("vit_tiny", "bert_small")]


def inputs(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def in_int8(model: nn.Module, x: np.ndarray) -> QuantizedModel:
    q = quantize(model.eval(), [x])
    assert isinstance(q, QuantizedModel)
    return q


def step_by_step(model: QuantizedModel, x: np.ndarray) -> np.ndarray:
    return model.run(x, lambda _, value: None)


@needs_native
@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_a_network_of_the_zoo_is_one_call_in_integers(name: str, tmp_path: Path, settings_restored: Any) -> None:
    x = inputs(2, 3, 32, 48)
    model = zoo.ZOO[name]().eval()
    q = in_int8(model, x)
    assert [r.name for r in q.report() if r.form == "float32"] == []
    assert len(q._segments) == 1 and isinstance(q._segments[0], Segment)
    expected = step_by_step(q, x)
    for isa in native.supported_isas():
        native.set_isa(isa)
        for threads in (1, 3):
            native.set_num_threads(threads)
            np.testing.assert_array_equal(q.run(x), expected, err_msg=f"{isa}, {threads} threads")
    np.testing.assert_array_equal(q.run(x[1:]), expected[1:])
    save_quantized(q, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(load_quantized(tmp_path / "model.safetensors").run(x), expected)


@pytest.mark.parametrize("name", ["mobilenet_v3", "shufflenet_v2", "densenet121"])
def test_a_network_that_was_loaded_is_quantized_like_the_module(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    x = inputs(2, 3, 32, 32)
    model = zoo.ZOO[name]().eval()
    tilewise.onnx.save(model, tmp_path / "float.onnx", x)
    q = in_int8(tilewise.onnx.load(tmp_path / "float.onnx"), x)
    assert [r.name for r in q.report() if r.form == "float32"] == []
    np.testing.assert_allclose(q.run(x), in_int8(model, x).run(x), atol=0.02 * np.abs(q.run(x)).max())


@pytest.mark.parametrize("name", ["mobilenet_v2", "efficientnet_b0", "shufflenet_v2", "unet", "resnext50"])
def test_onnx_runtime_reads_the_file_to_the_same_numbers(name: str, tmp_path: Path) -> None:
    x = inputs(2, 3, 32, 32)
    q = in_int8(zoo.ZOO[name](), x)
    tilewise.onnx.save(q, tmp_path / "int8.onnx")
    output, want = reference(tmp_path / "int8.onnx", x), q.run(x)
    assert np.abs(output - want).max() <= 0.03 * np.abs(want).max()


class Joined(nn.Module):
    """Concatenations in each other, of slices, of a value with itself, with odd numbers of channels."""

    def __init__(self) -> None:
        self.a, self.b = nn.Conv2d(3, 7, 3, padding=1, rng=0), nn.Conv2d(7, 5, 3, padding=1, rng=1)
        self.c, self.d = nn.Conv2d(12, 6, 1, rng=2), nn.Conv2d(9, 9, 5, padding=2, groups=9, rng=3)
        self.e, self.f = nn.Conv2d(6, 3, 3, padding=2, rng=4), nn.Conv2d(27, 4, 3, rng=5)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x).relu()
        ab = cat([a, self.b(a)], axis=1)
        c = self.c(ab)
        part = cat([ab[:, 1:4], c], axis=1)
        d = self.d(part)
        twice = cat([c[:, :3], c[:, :3]], axis=1)
        whole = cat([d * d, ab, self.e(ab[:, 5:11])[:, :, 1:-1, 1:-1], twice[:, 2:5]], axis=1)
        return self.f(whole) + whole[:, 20:24, 1:-1, 1:-1]


@needs_native
def test_concatenations_lie_where_they_are_read(settings_restored: Any) -> None:
    x, model = inputs(3, 3, 9, 8), Joined().eval()
    q = in_int8(model, x)
    expected = step_by_step(q, x)
    for isa in native.supported_isas():
        native.set_isa(isa)
        np.testing.assert_array_equal(q.run(x), expected, err_msg=isa)
    with no_grad():
        exact = model(Tensor(x)).data
    assert np.abs(expected - exact).max() <= 0.05 * np.abs(exact).max()


def test_rounded_weights_do_not_move_the_mean_of_a_channel() -> None:
    """The bias takes over what rounding took from the weights, so that a mean over pixels is as good as many bits."""
    model = nn.Sequential(nn.Conv2d(8, 40, 1, rng=0), nn.GlobalAvgPool()).eval()
    x = np.abs(inputs(4, 8, 40, 40))
    with no_grad():
        exact = model(Tensor(x)).data
    q: Any = quantize(model, [x], max_error=None)
    step = q.affine[-1].scale
    assert np.abs(q.run(x) - exact).max() <= 0.75 * step


@pytest.mark.parametrize("name", ["vit_tiny", "bert_small"])
def test_transformers_have_integer_products(name: str) -> None:
    model = zoo.ZOO[name]().eval()
    x = np.zeros((1, *model.example_shape), np.int64) if name == "bert_small" else inputs(1, *model.example_shape)
    q = quantize(model, [x])
    assert any(getattr(m, "computes_in_int8", False) for m in q.modules())
    with no_grad():
        output, want = q(Tensor(x)).data, model(Tensor(x)).data
    assert np.abs(output - want).max() <= 0.05 * np.abs(want).max()


@needs_native
@pytest.mark.parametrize("form", ["float32", "int8"])
def test_a_thousand_passes_allocate_nothing_after_the_first(form: str, settings_restored: Any) -> None:
    native.set_num_threads(2)
    x = inputs(1, 3, 9, 8)
    compiled = in_int8(Joined(), x).run if form == "int8" else plan.compile(Joined().eval(), x)
    assert_passes_allocate_nothing(compiled, x, 1000)


class _WrittenOut(nn.Module):
    """GELU by its error function, and a border beside the convolution: as files have them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, rng=0), nn.Conv2d(16, 8, 3, stride=2, rng=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x.pad(((0, 0), (0, 0), (1, 1), (1, 1))))
        y = y * 0.5 * (F.erf(y / math.sqrt(2)) + 1)
        return self.second(y.pad(((0, 0), (0, 0), (0, 1), (0, 1))))


def test_activations_and_borders_that_a_file_writes_out_are_integers() -> None:
    x = np.random.default_rng(0).standard_normal((4, 3, 16, 16)).astype(np.float32)
    model = _WrittenOut().eval()
    with no_grad():
        q, exact = quantize(model, [x]), model(Tensor(x)).data
        assert isinstance(q, QuantizedModel) and [step.kind for step in q.graph.steps] == ["input", "conv", "conv"]
        assert np.abs(q(Tensor(x)).data - exact).max() <= 0.01 * np.abs(exact).max()
