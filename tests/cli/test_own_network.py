"""`tilewise quantize` and `prune` on an ONNX file that is not for the digits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import tilewise.onnx
from tilewise import nn
from tilewise.cli.app import app
from tilewise.cli.commands import register
from tilewise.errors import ConfigurationError


def invoke(*words: object) -> str:
    if not app.registered_commands:
        register(app)
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def network(tmp_path: Path) -> Path:
    layers = [nn.Conv2d(3, 8, 3, padding=1, rng=0), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, rng=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.GlobalAvgPool(), nn.Linear(16, 5, rng=2)).eval()
    x = np.random.default_rng(0).random((40, 3, 12, 12), np.float32)
    tilewise.onnx.save(model, tmp_path / "net.onnx", x[:2])
    np.savez(tmp_path / "x.npz", x)
    return tmp_path / "net.onnx"


def inputs(network: Path) -> np.ndarray:
    return np.load(network.parent / "x.npz")["arr_0"]


def in_onnx_runtime(path: Path, x: np.ndarray) -> np.ndarray:
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})[0]


@pytest.mark.parametrize(("command", "tolerance"), [("quantize", 0.02), ("prune", 1e-5)])
def test_the_saved_network_gives_the_same_in_onnx_runtime(network: Path, command: str, tolerance: float) -> None:
    small = network.parent / "small.onnx"
    words = (command, network, "--calibration", network.parent / "x.npz", "--out", small, "--runs", 12, "--json")
    facts = json.loads(invoke(*words))
    assert facts["saved"] == str(small)
    assert facts["error_of_largest"] < (0.02 if command == "quantize" else 1.5)
    ours = np.asarray(tilewise.onnx.load(small)(inputs(network)))
    theirs = in_onnx_runtime(small, inputs(network))
    assert np.abs(ours - theirs).max() <= tolerance * np.abs(theirs).max()
    assert "Saved as" in invoke(*words[:-1])  # over the file that is there


def test_pruning_takes_the_scope_that_changes_results_least(network: Path) -> None:
    model = tilewise.onnx.load(network)
    first, *_ = (tensor for name, tensor in model.named_tensors() if name.endswith("weight"))
    first.data[:] *= 1e-3  # compared with all layers, this one would lose every weight
    tilewise.onnx.save(model, network, inputs(network)[:2])
    x = network.parent / "last.npz"  # one batch: the candidates are compared on it
    np.savez(x, inputs(network)[:8])

    def change(*options: str) -> float:
        words = ("prune", network, "--calibration", x, "--out", network.parent / "p.onnx", "--runs", 12, "--json")
        json.loads(invoke(*words, *options))
        pruned = np.asarray(tilewise.onnx.load(network.parent / "p.onnx")(inputs(network)[:8]))
        return float(np.square(pruned - np.asarray(tilewise.onnx.load(network)(inputs(network)[:8]))).sum())

    with pytest.raises(ConfigurationError, match="would lose every weight"):
        change("--scope", "global")
    with pytest.raises(ConfigurationError, match="would lose every weight"):
        change("--sparsity", "1.0")  # in every scope
    assert change() <= change("--scope", "layer") + 1e-6


def test_mistakes_are_one_sentence(network: Path) -> None:
    calibration = ("--calibration", network.parent / "x.npz")
    for words, message in {
        ("quantize", network, *calibration, "--out", network): "is the network itself",
        ("quantize", "cnn", *calibration): "belongs to an ONNX file",
        ("prune", network, *calibration, "--structured"): "need a model of ours",
    }.items():
        with pytest.raises(ConfigurationError, match=message):
            invoke(*words)
