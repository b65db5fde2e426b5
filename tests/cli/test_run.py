"""`tilewise run`, and other commands on ONNX files: what they print, what they write, and one sentence for mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import tilewise.onnx
from tilewise import models
from tilewise.cli.app import app
from tilewise.cli.commands import register
from tilewise.errors import TilewiseError


def invoke(*words: object) -> str:
    if not app.registered_commands:
        register(app)
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    tilewise.onnx.save(models.pretrained("cnn"), tmp_path / "digits.onnx")
    return tmp_path / "digits.onnx"


def test_run_says_what_comes_out_and_how_long_a_pass_takes(digits: Path) -> None:
    facts = json.loads(invoke("run", digits, "--batch", 3, "--runs", 3, "--json"))
    assert facts["inputs"] == {"input": [3, 1, 8, 8]}
    assert facts["outputs"]["output"]["shape"] == [3, 10]
    assert facts["p50_s"] > 0
    assert "one pass takes" in invoke("run", digits, "--runs", 3)


def test_run_takes_an_input_and_writes_results_and_the_int8_network(digits: Path, tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((4, 1, 8, 8), dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    words = ("--input", tmp_path / "x.npy", "--int8", "--out", tmp_path / "y.npz", "--save", tmp_path / "q.onnx")
    facts = json.loads(invoke("run", digits, *words, "--runs", 3, "--json"))
    assert facts["int8"]["layers_in_int8"] == facts["int8"]["layers"] == 4
    assert facts["int8"]["error_of_largest"] < 0.02
    with np.load(tmp_path / "y.npz") as written:
        np.testing.assert_allclose(written["output"], tilewise.onnx.load(tmp_path / "q.onnx")(x).data, atol=0.5)


def test_int8_that_is_off_by_more_than_it_should_is_not_used(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = {"error_of_largest": 0.02, "stated_error": 0.02, "layers_in_int8": 4, "layers": 4}
    monkeypatch.setattr("tilewise.cli.run._cost_of_int8", lambda *_: dict(cost))
    x = np.random.default_rng(0).random((4, 1, 8, 8), dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    words = ("--input", tmp_path / "x.npy", "--int8", "--out", tmp_path / "y.npz", "--runs", 3)
    facts = json.loads(invoke("run", digits, *words, "--json"))
    assert facts["int8"]["kept_float"] == "off by more than 1%: kept float"
    with np.load(tmp_path / "y.npz") as written:
        np.testing.assert_allclose(written["output"], tilewise.onnx.load(digits)(x).data, rtol=1e-4, atol=1e-5)


def test_run_takes_a_network_of_the_zoo_by_name(tmp_path: Path) -> None:
    facts = json.loads(invoke("run", "squeezenet", "--runs", 1, "--save", tmp_path / "s.onnx", "--json"))
    assert facts["outputs"]["output"]["shape"] == [1, 1000]
    assert tilewise.onnx.load(tmp_path / "s.onnx").inputs[0].shape == ("N", 3, 224, 224)


@pytest.mark.parametrize("command", ["quantize", "prune"])
def test_commands_on_digits_take_a_network_for_them(command: str, digits: Path, tmp_path: Path) -> None:
    facts = json.loads(invoke(command, digits, "--runs", 12, "--batch", 8, "--out", tmp_path / "out", "--json"))
    assert facts["models"][0]["accuracy"] > 0.98


def test_what_cannot_be_run_is_one_sentence(digits: Path, tmp_path: Path) -> None:
    tilewise.onnx.save(models.vgg6(), tmp_path / "vgg6.onnx")
    (tmp_path / "x.npy").write_bytes(b"no numbers")
    mistakes = {
        ("run", "resnet19"): "neither an ONNX file nor a network of the zoo",
        ("run", tmp_path / "none.onnx"): "does not exist",
        ("run", digits, "--input", tmp_path / "x.npy"): "is not an npy array",
        ("quantize", tmp_path / "vgg6.onnx"): "give inputs of the network",
    }
    for words, message in mistakes.items():
        with pytest.raises(TilewiseError, match=message):
            invoke(*words)
