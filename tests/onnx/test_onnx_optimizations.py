"""What tilewise does to models, it does to loaded networks: quantize, prune, profile, save again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tilewise.onnx
from tests.onnx_reference import reference
from tilewise import data, models, nn, no_grad
from tilewise.models import zoo
from tilewise.profile import FLOPCounter
from tilewise.profile.targets import model_target
from tilewise.prune import prune
from tilewise.quantize import QuantizedModel, quantize


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def loaded(model: nn.Module, path: Path, example: np.ndarray | None = None) -> tilewise.onnx.Network:
    tilewise.onnx.save(model, path, example)
    return tilewise.onnx.load(path)


def test_a_trained_network_that_was_loaded_quantizes_with_its_accuracy(tmp_path: Path) -> None:
    images = data.digits()
    network = loaded(models.pretrained("cnn"), tmp_path / "m.onnx")
    int8 = quantize(network, [images.x_train[:256]])
    assert isinstance(int8, QuantizedModel)
    assert all(step.form in ("int8", "int16") for step in int8.report())
    assert int8.measured_error is not None and int8.measured_error <= 0.01
    with no_grad():
        exact = network(images.x_test).data.argmax(1)
    assert (int8(images.x_test).data.argmax(1) == exact).mean() >= 0.99


@pytest.mark.parametrize(("name", "worst"), [("resnet18", 0.06), ("squeezenet", 0.06)])
def test_a_loaded_network_runs_in_integers_and_is_written_so(name: str, worst: float, tmp_path: Path) -> None:
    x = normal(4, 3, 64, 64)
    network = loaded(zoo.ZOO[name](classes=10), tmp_path / "m.onnx", x[:2])
    int8 = quantize(network, [x])
    forms = {(step.kind, step.form) for step in int8.report() if step.kind in ("conv", "linear")}
    assert {form for _, form in forms} <= {"int8", "int16"}
    with no_grad():
        exact = network(x).data
    ours = int8(x).data
    assert np.abs(ours - exact).max() <= worst * np.abs(exact).max()
    tilewise.onnx.save(int8, tmp_path / "q.onnx")
    theirs = reference(tmp_path / "q.onnx", x)
    # a number on the edge between two bytes may be rounded the other way, and layers after it carry that on
    assert np.abs(ours - theirs).max() <= worst * np.abs(exact).max()


def test_a_loaded_network_prunes(tmp_path: Path) -> None:
    network = loaded(models.mlp(), tmp_path / "m.onnx")
    pruned = prune(network, 0.5)
    weights = [p.data for name, p in pruned.named_parameters() if name.endswith("weight")]
    zeros = sum(int((w == 0).sum()) for w in weights)
    assert zeros == pytest.approx(0.5 * sum(w.size for w in weights), rel=0.01)


def test_a_loaded_network_has_the_work_of_the_model(tmp_path: Path) -> None:
    model, x = models.resnet8().eval(), normal(2, 3, 32, 32)
    network = loaded(model, tmp_path / "m.onnx")
    assert FLOPCounter().count_ops(network, x).total == FLOPCounter().count_ops(model, x).total


def test_commands_that_take_a_model_take_an_onnx_file(tmp_path: Path) -> None:
    tilewise.onnx.save(models.cnn(), tmp_path / "m.onnx")
    target = model_target(str(tmp_path / "m.onnx"), batch=3)
    assert target.call().shape == (3, 10)
    model_target(str(tmp_path / "m.onnx"), batch=3, backward=True).call()
