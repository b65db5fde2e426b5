"""Operators without an integer form run as a float plan; the numbers do not depend on how the model is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewise.onnx
from tilewise import Tensor, nn
from tilewise._extension import native
from tilewise.errors import ShapeError
from tilewise.graph.executor import PythonCall
from tilewise.nn.recurrent import Recurrent
from tilewise.ops import Elu
from tilewise.quantize import load_quantized, quantize, save_quantized
from tilewise.quantize.model import QuantizedModel
from tilewise.tensor import apply, cat

pytestmark = pytest.mark.skipif(native is None, reason="islands are native plans")


class Function(nn.Module):
    """A layer that computes a function of tensors."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.function(x)
        return result


def spatial_attention(x: Tensor) -> Tensor:
    return x * x.mean(1, keepdims=True).sigmoid()


def recurrent(x: Tensor) -> Tensor:
    """A recurrent layer over the pixels: the batch is the second axis, and the first state is repeated for it."""
    rng = np.random.default_rng(3)
    weights = [Tensor(0.3 * rng.standard_normal(shape, dtype=np.float32)) for shape in ((8, 8), (8, 8), (16,))]
    state = Tensor(np.repeat(rng.standard_normal((1, 8), dtype=np.float32), x.shape[0], 0))
    tokens = x.reshape(x.shape[0], 8, 63).permute(2, 0, 1)
    hidden = apply(Recurrent, tokens, *weights, state, kind="rnn_tanh", reverse=False)
    return hidden.permute(1, 2, 0).reshape(*x.shape)


def heads(x: Tensor) -> Tensor:
    """Several results one behind the other, in front of the batch, as networks with several heads add them."""
    ends = [y.reshape(1, *y.shape) for y in (x.tanh(), x * np.full((1, x.shape[0], 1, 1, 1), 0.5, np.float32)[0])]
    return cat(ends, 0).sum(0)


FUNCTIONS = {
    "tanh": lambda x: x.tanh(),
    "elu": lambda x: apply(Elu, x),
    "softmax": lambda x: (x.exp() / x.exp().sum(1, keepdims=True)) + x,
    "spatial attention": spatial_attention,
    "recurrent": recurrent,
    "heads": heads,
    "tokens": lambda x: x.reshape(x.shape[0], 8, -1).transpose(1, 2).tanh().transpose(1, 2).reshape(*x.shape),
}


def network(function: Any) -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3, padding=1, rng=0), Function(function), nn.Conv2d(8, 6, 3, padding=1, rng=1)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(6 * 9 * 7, 5, rng=2)).eval()


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 3, 9, 7)).astype(np.float32)


def quantized(function: Any) -> QuantizedModel:
    model = quantize(network(function), [images(4, seed) for seed in range(4)])
    assert isinstance(model, QuantizedModel)
    return model


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_island_agrees_with_float_for_other_batches_and_step_by_step(name: str) -> None:
    model, module = quantized(FUNCTIONS[name]), network(FUNCTIONS[name])
    assert model.islands
    for count in (1, 3, 4):
        x = images(count, 9)
        expected, result = module(Tensor(x)).numpy(), model.run(x)
        assert np.abs(result - expected).max() < 0.02 * np.abs(expected).max()
        assert np.array_equal(model.run(x, lambda index, value: None), result)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_onnx_file_of_an_island_gives_the_same_for_any_batch(name: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    model = quantized(FUNCTIONS[name])
    tilewise.onnx.save(model, tmp_path / "model.onnx")
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    for count in (1, 3, 5):
        expected = model.run(images(count, 9))
        (result,) = session.run(None, {"input": images(count, 9)})
        assert np.abs(result - expected).max() < 0.02 * np.abs(expected).max()


def test_the_operators_of_an_island_run_natively() -> None:
    model = quantized(FUNCTIONS["softmax"])
    model.run(images(2))
    calls = [call for island in model.islands.values() for plan in island._plans.values() for call in plan.calls]
    assert calls and not any(isinstance(call, PythonCall) for call in calls)


def test_a_recurrent_layer_counts_as_a_layer_in_float() -> None:
    assert quantized(recurrent).layer_counts() == (3, 4)


def test_a_value_that_is_read_twice_ends_an_island() -> None:
    def branches(x: Tensor) -> Tensor:
        y = x.tanh()
        return y.exp() + y.abs()

    model = quantized(branches)
    for island in model.islands.values():
        outside = [s for i, s in enumerate(model.graph.steps) if i not in island.steps]
        assert not any(i in step.inputs for step in outside for i in island.steps[:-1])
    x = images(3, 5)
    assert np.abs(model.run(x) - network(branches)(Tensor(x)).numpy()).max() < 0.05


def test_a_loaded_model_gives_the_same_integers(tmp_path: Path) -> None:
    model = quantized(spatial_attention)
    save_quantized(model, tmp_path / "model.safetensors")
    again = load_quantized(tmp_path / "model.safetensors")
    x = images(5, 7)
    assert np.array_equal(again(x).data, model(x).data)


def test_an_operation_with_a_fixed_batch_refuses_other_batches() -> None:
    where = np.ix_(np.arange(2), np.arange(8), np.arange(9), np.arange(7))
    with pytest.raises(ShapeError, match="takes batches of 2 only, not of"):
        quantize(network(lambda x: x[where]), [images(2, seed) for seed in range(4)])
