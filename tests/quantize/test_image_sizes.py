"""Images of another size, and batches of another size, than the example's: the network's result, or one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewise import Tensor, nn, no_grad
from tilewise.errors import ShapeError
from tilewise.quantize import load_quantized, quantize, save_quantized


class ImageTokens(nn.Module):
    """The pixels of an image as tokens: a reshape to the traced size mixed the images of a batch."""

    def forward(self, x: Any) -> Any:
        return x.reshape(x.shape[0], x.shape[1], x.shape[2] * x.shape[3])


class MeanByHand(nn.Module):
    """A mean whose number of pixels is a constant of the trace."""

    def forward(self, x: Any) -> Any:
        return x.sum((2, 3)) * (1 / (x.shape[2] * x.shape[3]))


class Cropped(nn.Module):
    def forward(self, x: Any) -> Any:
        return x[:, :, 1:-1]


class Tokens(nn.Module):
    """A network of linear layers, quantized dynamically; `size` is what each image becomes before they read it."""

    def __init__(self, pixels: int | None = None, batch: int | None = None) -> None:
        super().__init__()
        rng = np.random.default_rng(2)
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 32, rng=rng), nn.Linear(32, 4, rng=rng)
        self.pixels, self.batch = pixels, batch

    def forward(self, x: Any) -> Any:
        if self.pixels is not None:
            x = x.reshape(self.batch or x.shape[0], 4, self.pixels, 1)
        return self.down(self.up(self.norm(x.permute(0, 2, 3, 1))).relu()).mean((1, 2))


def network(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, rng=np.random.default_rng(1)), nn.ReLU(), *layers).eval()


def quantized_and_result(model: nn.Module) -> tuple[Any, np.ndarray, np.ndarray]:
    """The network quantized on images of 6x5, images of 9x8, and the network's result for these."""
    x = np.random.default_rng(0).standard_normal((3, 4, 6, 5)).astype(np.float32)
    larger = np.tile(x, (1, 1, 2, 2))[..., :9, :8]
    with no_grad():
        return quantize(model, [x], max_error=None), larger, model(Tensor(larger)).data


@pytest.mark.parametrize(
    "layers", [[nn.Upsample(2)], [nn.GlobalAvgPool(), nn.Linear(8, 3)], [nn.MaxPool2d(2)], [Cropped()]]
)
def test_a_network_that_does_not_know_its_size_takes_any(layers: list[nn.Module], tmp_path: Path) -> None:
    q, larger, expected = quantized_and_result(network(*layers))
    result = q.run(larger)
    assert result.shape == expected.shape
    assert np.abs(result - expected).max() < 0.1 * np.abs(expected).max()
    save_quantized(q, tmp_path / "model")
    np.testing.assert_array_equal(load_quantized(tmp_path / "model").run(larger), result)


@pytest.mark.parametrize("layer", [nn.Upsample(2, "bilinear"), ImageTokens(), MeanByHand(), nn.Flatten()])
def test_a_network_that_computes_with_its_size_refuses_others(layer: nn.Module, tmp_path: Path) -> None:
    q, larger, _ = quantized_and_result(network(layer))
    save_quantized(q, tmp_path / "model")
    for model in (q, load_quantized(tmp_path / "model")):
        with pytest.raises(ShapeError, match=r"the size of its calibration images, \(N, 4, 6, 5\), and cannot take"):
            model.run(larger)


def loaded(model: nn.Module, folder: Path, x: np.ndarray) -> Any:
    save_quantized(quantize(model.eval(), [x]), folder / "model")
    return load_quantized(folder / "model")


@pytest.mark.filterwarnings("ignore:INT8 is off")
def test_a_loaded_dynamic_network_takes_any_size_if_it_does_not_know_its_own(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    model, x = Tokens(), rng.standard_normal((2, 4, 6, 5), dtype=np.float32)
    again, other = loaded(model, tmp_path, x), rng.standard_normal((3, 4, 9, 8), dtype=np.float32)
    with no_grad():
        np.testing.assert_array_equal(again(Tensor(other)).data, quantize(model, [x])(Tensor(other)).data)


@pytest.mark.filterwarnings("ignore:INT8 is off")
@pytest.mark.parametrize(
    ("settings", "shape", "reason"),
    [
        ({"pixels": 30}, (2, 4, 12, 10), r"inputs of \(N, 4, 6, 5\), and cannot take \(2, 4, 12, 10\): save it with"),
        ({"pixels": 30}, (2, 4, 30), r"cannot take \(2, 4, 30\)"),
        ({}, (2, 2, 12, 10), r"cannot take \(2, 2, 12, 10\)"),
        ({"pixels": 30, "batch": 2}, (1, 4, 6, 5), r"takes batches of 2, and cannot take \(1, 4, 6, 5\)"),
    ],
)
def test_a_loaded_dynamic_network_refuses_what_its_operations_do_not_hold_for(
    settings: dict[str, int], shape: tuple[int, ...], reason: str, tmp_path: Path
) -> None:
    again = loaded(Tokens(**settings), tmp_path, np.random.default_rng(0).standard_normal((2, 4, 6, 5), np.float32))
    with no_grad(), pytest.raises(ShapeError, match=reason):
        again(Tensor(np.zeros(shape, np.float32)))
