"""Four-bit models come back from disk with the same numbers, and files that do not fit are one sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tilewise import Tensor, models, nn, no_grad, save
from tilewise.errors import ConfigurationError, FileFormatError
from tilewise.io import load_arrays
from tilewise.nn import GPT, Module
from tilewise.quantize import load_four_bits, quantize, save_four_bits


def small_gpt() -> GPT:
    return GPT(2, 66, 3, vocab=50, context=16, rng=3)


def result(model: Module, x: object) -> np.ndarray:
    with no_grad():
        return np.array(model(x).data)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_model_comes_back_with_the_same_numbers(tmp_path: Path, symmetric: bool) -> None:
    tokens = np.arange(24).reshape(2, 12)
    model = quantize(small_gpt(), bits=4, symmetric=symmetric)
    save_four_bits(model, tmp_path / "gpt.safetensors")
    again = load_four_bits(small_gpt(), tmp_path / "gpt.safetensors")
    assert np.array_equal(result(again, tokens), result(model, tokens))


def test_odd_widths_and_layers_without_bias_come_back(tmp_path: Path) -> None:
    def fresh() -> Module:
        return nn.Sequential(nn.Linear(37, 5, bias=False), nn.ReLU(), nn.Linear(5, 3))

    x = Tensor(np.linspace(-1, 1, 74, dtype=np.float32).reshape(2, 37))
    model = quantize(fresh(), bits=4)
    save_four_bits(model, tmp_path / "net.safetensors")
    assert np.array_equal(result(load_four_bits(fresh(), tmp_path / "net.safetensors"), x), result(model, x))


def test_a_file_takes_little_more_than_half_a_byte_a_weight(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(1024, 1024))
    save_four_bits(quantize(model, bits=4), tmp_path / "net.safetensors")
    assert (tmp_path / "net.safetensors").stat().st_size < 0.6 * 1024 * 1024


def test_a_float_model_is_not_saved_as_one_of_four_bits(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no four-bit layer"):
        save_four_bits(models.mlp(), tmp_path / "mlp.safetensors")


def test_a_file_of_another_architecture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    save_four_bits(quantize(nn.Sequential(nn.Linear(64, 8)), bits=4), path)
    for other in (
        nn.Sequential(nn.Linear(64, 9)),
        nn.Sequential(nn.Linear(60, 8)),
        nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 8)),
        nn.Sequential(nn.Linear(64, 8), nn.LayerNorm(8)),
        nn.Sequential(nn.ReLU()),
    ):
        with pytest.raises(FileFormatError, match="another architecture"):
            load_four_bits(other, path)


def test_a_file_of_another_kind_or_with_impossible_numbers_is_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "net.safetensors", nn.Sequential(nn.Linear(64, 8))
    save(model, path)
    with pytest.raises(FileFormatError, match="does not hold a four-bit model"):
        load_four_bits(model, path)
    save_four_bits(quantize(model, bits=4), path)
    arrays, metadata = load_arrays(path)
    for name, wrong in (("0.scales", np.nan), ("0.codes", None), ("0.column_scale", np.inf)):
        stored_arrays = {
            n: a.astype(np.float32) if wrong is None and n == name else np.array(a) for n, a in arrays.items()
        }
        if wrong is not None:
            stored_arrays[name].flat[0] = wrong
        save(stored_arrays, path, {"format": metadata["format"]})
        with pytest.raises(FileFormatError, match="or invalid "):
            load_four_bits(model, path)
