"""Promises of dynamically quantized transformers: their error is stated, options count, and plain calls work."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewise import nn
from tilewise.errors import AccuracyError, ConfigurationError
from tilewise.nn.self_planning import explain
from tilewise.quantize import convert as checks_module
from tilewise.quantize import load_quantized, quantize, save_quantized
from tilewise.quantize.layers import QuantizedLinear
from tilewise.tensor import Tensor, cat, no_grad

RNG = np.random.default_rng(7)


class Encoder(nn.Module):
    """One attention layer with position embeddings that are repeated for every image of the batch."""

    def __init__(self) -> None:
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiHeadAttention(16, 2, rng=0)
        self.head = nn.Linear(32, 5, rng=1)
        self.positions = RNG.standard_normal((1, 4, 16)).astype(np.float32)

    def forward(self, x: Any) -> Any:
        x = x if isinstance(x, Tensor) else Tensor(x)
        repeated = Tensor(np.repeat(self.positions, len(x.data), 0))
        return self.head(cat([self.attention(self.norm(x)), repeated], axis=2))


@pytest.fixture
def batch() -> Any:
    return RNG.standard_normal((6, 4, 16)).astype(np.float32)


def test_a_quantized_transformer_runs_outside_no_grad_and_states_its_error(batch: Any) -> None:
    model = Encoder()
    int8: Any = quantize(model, [batch], max_error=None)
    result, exact = np.asarray(int8(batch).data), np.asarray(model(batch).data)
    error = np.abs(result - exact).max((1, 2)) / np.abs(exact).max((1, 2))
    assert 0 < int8.measured_error <= int8.stated_error
    assert error.max() == pytest.approx(int8.measured_error, rel=0.2)


def test_an_error_above_the_bound_is_a_warning_with_the_remedy(batch: Any) -> None:
    with pytest.warns(UserWarning, match="more than max_error=1e-06.*keep_float"):
        quantize(Encoder(), [batch], max_error=1e-6)


def test_layers_can_be_kept_in_float(batch: Any) -> None:
    int8: Any = quantize(Encoder(), [batch], keep_float=["head"], max_error=None)
    assert isinstance(int8.head, nn.Linear) and not isinstance(int8.head, QuantizedLinear)
    with pytest.raises(ConfigurationError, match="no linear layer 'tail'"):
        quantize(Encoder(), [batch], keep_float=["tail"])


def test_a_loss_of_accuracy_is_refused(batch: Any) -> None:
    model = Encoder()
    scores = {True: 0.9, False: 0.8}
    with pytest.raises(AccuracyError, match=r"loses 0\.1000"):
        quantize(model, [batch], accuracy_drop=0.05, evaluate=lambda m: scores[m is model])


def test_constants_repeated_for_every_image_are_saved(batch: Any, tmp_path: Path) -> None:
    int8 = quantize(Encoder(), [batch], max_error=None)
    save_quantized(int8, tmp_path / "encoder.safetensors")
    again = load_quantized(tmp_path / "encoder.safetensors")
    for count in (1, 3):
        assert np.array_equal(again(batch[:count]).data, int8(batch[:count]).data)


class Gram(nn.Module):
    """A linear layer between norms, softmax and a product of two tensors."""

    def __init__(self) -> None:
        self.norm, self.inside, self.head = nn.LayerNorm(16), nn.Linear(16, 16, rng=0), nn.Linear(4, 5, rng=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inside(self.norm(x))
        return self.head((y @ y.transpose(1, 2)).softmax(-1))


@pytest.mark.filterwarnings("ignore:INT8 is off by")
def test_another_process_loads_a_saved_model(batch: Any, tmp_path: Path) -> None:
    int8, path = quantize(Gram(), [batch]), tmp_path / "gram.safetensors"
    save_quantized(int8, path)
    np.save(tmp_path / "batch.npy", batch)
    program = (
        "import sys, numpy as np; from tilewise.quantize import load_quantized; from tilewise import no_grad\n"
        "with no_grad(): np.save(sys.argv[3], load_quantized(sys.argv[1])(np.load(sys.argv[2])).data)"
    )
    files = [str(path), str(tmp_path / "batch.npy"), str(tmp_path / "result.npy")]
    subprocess.run([sys.executable, "-W", "ignore", "-c", program, *files], check=True)
    with no_grad():
        np.testing.assert_array_equal(np.load(tmp_path / "result.npy"), int8(batch).data)


@pytest.mark.filterwarnings("ignore:INT8 is off by")
def test_a_quantized_model_and_its_loaded_copy_are_planned_from_the_first_call(batch: Any, tmp_path: Path) -> None:
    pytest.importorskip("tilewise._native")
    int8 = quantize(Gram(), [batch])
    save_quantized(int8, tmp_path / "gram.safetensors")
    for model in (int8, load_quantized(tmp_path / "gram.safetensors")):
        with no_grad():
            model(batch)
        assert "planned in" in explain(model)


@pytest.mark.parametrize(("float_seconds", "int8_seconds", "warns"), [(1.0, 2.0, True), (1.0, 1.05, False)])
def test_int8_that_is_slower_than_float_is_said(
    float_seconds: float, int8_seconds: float, warns: bool, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tilewise._native")
    clock = [0.0]
    model, int8 = nn.Sequential(nn.Linear(16, 4, rng=0)), nn.Sequential()

    def plan(module: Any, _x: Any) -> Any:
        def run(_x: Any) -> None:
            clock[0] += float_seconds if module is model else int8_seconds

        return run

    monkeypatch.setattr("tilewise.plan.compile", plan)
    monkeypatch.setattr(checks_module.time, "perf_counter", lambda: clock[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checks_module.warn_if_slower(int8, model, batch)
    assert [("slower than float32" in str(w.message)) for w in caught] == [True] * warns


def test_a_transposed_weight_is_read_back_in_the_same_memory_order() -> None:
    from tilewise.quantize.traced_files import NodeReader, NodeWriter

    arrays: dict[str, np.ndarray] = {}
    weight = np.arange(6, dtype=np.float32).reshape(2, 3).T
    loaded = NodeReader(arrays)._value(NodeWriter(arrays, "n")._value(weight))
    np.testing.assert_array_equal(loaded, weight)
    assert loaded.strides == weight.strides  # else its products add up in another order than before saving
