"""Saving: what tilewise writes, ONNX Runtime runs with the same numbers; the zoo, the reference models, INT8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewise.onnx
from tests.onnx_reference import reference
from tilewise import Tensor, data, models, nn, no_grad
from tilewise.errors import ConfigurationError
from tilewise.models import zoo
from tilewise.nn import functional as F
from tilewise.quantize import quantize


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def assert_near(result: np.ndarray, want: np.ndarray, relative: float = 1e-4) -> None:
    assert result.shape == want.shape
    assert np.abs(result - want).max() <= relative * np.abs(want).max()


def check(model: nn.Module, path: Path, *inputs: np.ndarray, example: Any = None) -> None:
    """Saved, run by ONNX Runtime, loaded and run here, saved and run once more: all the same."""
    tilewise.onnx.save(model, path, example)
    with no_grad():
        ours = model(*(Tensor(x) for x in inputs)).data
        assert_near(reference(path, *inputs), ours)
        network = tilewise.onnx.load(path)
        assert_near(network(*inputs).data, ours)
    tilewise.onnx.save(network, path)
    assert_near(reference(path, *inputs), ours)


@pytest.mark.parametrize("name", zoo.ZOO)
def test_a_network_of_the_zoo_gives_the_same_in_onnx_runtime(name: str, tmp_path: Path) -> None:
    model = (zoo.vit_tiny(96) if name == "vit_tiny" else zoo.ZOO[name]()).eval()
    if name == "bert_small":
        ids = np.random.default_rng(0).integers(0, model.vocab, (3, 24))
        check(model, tmp_path / "m.onnx", ids, example=ids[:2])
        return
    size = {"vit_tiny": (96, 96), "unet": (48, 48)}.get(name, (43, 66))
    check(model, tmp_path / "m.onnx", normal(3, 3, *size), example=normal(2, 3, *size))


@pytest.mark.parametrize(
    ("name", "shape"), [("mlp", (64,)), ("cnn", (1, 8, 8)), ("vgg6", (3, 32, 32)), ("resnet8", (3, 32, 32))]
)
def test_a_reference_model_needs_no_example(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    check(getattr(models, name)().eval(), tmp_path / "m.onnx", normal(5, *shape))


def test_a_gpt_is_saved_with_its_context(tmp_path: Path) -> None:
    check(
        models.gpt("4x128", context=32).eval(), tmp_path / "m.onnx", np.random.default_rng(0).integers(0, 65, (3, 32))
    )


class Odds(nn.Module):
    """Operations that no network of the zoo has."""

    def __init__(self) -> None:
        self.norm, self.up = nn.GroupNorm(2, 4), nn.Upsample(2, "bilinear")

    def forward(self, x: Tensor) -> Tensor:
        y = F.leaky_relu(self.norm(x), 0.1) + F.elu(x, 0.5) * F.softplus(x)
        y = self.up(y).clip(-1.0, 2.0).maximum(Tensor(np.float32(0.05)))
        y = y[:, 1:, ::2, -1].unsqueeze(1) - y.var(axis=(2, 3), keepdims=True)[:, :3].reshape(-1, 1, 3, 1)
        y = (abs(y) + 1.0).log() ** 2.0 + y.cumsum(2).cos() + F.erf(y).exp().sqrt()
        return y.log_softmax(-1).max(1)


def test_odd_operations_are_written(tmp_path: Path) -> None:
    check(Odds().eval(), tmp_path / "m.onnx", normal(3, 4, 6, 6), example=normal(2, 4, 6, 6))


def test_a_model_that_does_not_say_what_it_takes_asks_for_an_example(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="pass save an example"):
        tilewise.onnx.save(Odds(), tmp_path / "m.onnx")


def test_saving_leaves_the_model_in_its_mode(tmp_path: Path) -> None:
    model = models.cnn().train()
    tilewise.onnx.save(model, tmp_path / "m.onnx")
    assert model.training


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_an_int8_model_answers_as_here_in_onnx_runtime(name: str, tmp_path: Path) -> None:
    images = data.digits().flat() if name == "mlp" else data.digits()
    model = quantize(models.pretrained(name), [images.x_train[:256]])
    tilewise.onnx.save(model, tmp_path / "q.onnx")
    x = images.x_test[:300]
    ours, theirs = model(x).data, reference(tmp_path / "q.onnx", x)
    assert (ours.argmax(1) == theirs.argmax(1)).mean() >= 0.99
    assert_near(theirs, ours, 0.01)
    assert_near(tilewise.onnx.load(tmp_path / "q.onnx")(x).data, ours, 0.01)


@pytest.mark.parametrize("name", ["vgg6", "resnet8"])
def test_an_int8_network_of_images_is_written_in_bytes(name: str, tmp_path: Path) -> None:
    x = normal(4, 3, 32, 32)
    model = quantize(getattr(models, name)().eval(), [x])
    tilewise.onnx.save(model, tmp_path / "q.onnx")
    assert_near(reference(tmp_path / "q.onnx", x), model(x).data, 0.01)
    tilewise.onnx.save(getattr(models, name)(), tmp_path / "float.onnx")
    assert (tmp_path / "q.onnx").stat().st_size < 0.4 * (tmp_path / "float.onnx").stat().st_size
