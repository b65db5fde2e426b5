"""`tilewise tune` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from tilewise import models
from tilewise._extension import native
from tilewise.backend import OptimizedBackend, TileConfig, matmul_native, tile_space
from tilewise.cli.tune import tune
from tilewise.errors import ConfigurationError
from tilewise.quantize import quantize, save_quantized

pytestmark = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")


def run(*arguments: str, code: int = 0) -> str:
    app = typer.Typer()
    app.command()(tune)
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, f"{result.output} {result.exception!r}"
    return result.stdout


def test_a_shape_is_tuned_once_and_then_known(tmp_path: Path):
    arguments = ("matmul", "40x48x56", "--cache", str(tmp_path), "--budget", "3", "--set", "layout=nt", "--json")
    decisions = [json.loads(run(*arguments))]
    # Measurements that contradict each other, as on a busy machine, are not stored: tune until they agree.
    while decisions[-1]["source"] != "cache" and len(decisions) < 20:
        decisions.append(json.loads(run(*arguments)))
    *fresh, cached = decisions
    assert fresh and cached["source"] == "cache" and cached["config"] == fresh[-1]["config"]
    assert all(one["source"] == "measured" and one["measurements"] <= 3 for one in fresh)
    assert fresh[0]["problem"]["layout"] == "nt"
    assert "registers" not in run(*arguments[:-1]) and (tmp_path / "choices.jsonl").is_file()


def test_a_model_is_tuned_layer_by_layer_whatever_files_have_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("mlp").write_text("notes")
    document = json.loads(run("mlp", "--batch", "16", "--cache", str(tmp_path), "--budget", "2", "--json"))
    assert document["layers"] and document["before_ns"] > 0 and document["after_ns"] > 0
    assert {layer["op"] for layer in document["layers"]} == {"matmul"}


def test_a_quantized_file_is_tuned_layer_by_layer(tmp_path: Path):
    x, file = np.random.default_rng(0).random((8, 1, 8, 8), dtype=np.float32), tmp_path / "cnn.safetensors"
    save_quantized(quantize(models.cnn().eval(), [x], max_error=None), file)
    document = json.loads(run(str(file), "--batch", "4", "--cache", str(tmp_path), "--budget", "2", "--json"))
    assert {layer["op"] for layer in document["layers"]} == {"int8_conv2d", "int8_matmul"}
    (product,) = [layer for layer in document["layers"] if layer["op"] == "int8_matmul"]
    assert product["tuned"]["default_ns"] > 0 and product["tuned"]["runtime_ns"] > 0
    assert product["shape"][1:] == [10, 256] and document["before_ns"] > 0 and document["after_ns"] > 0


def test_a_list_of_shapes_is_checked_against_the_exhaustive_best(tmp_path: Path):
    shapes = tmp_path / "shapes.json"
    shapes.write_text('[{"family": "matmul", "m": 9, "n": 17, "k": 12}]')
    document = json.loads(run("--check", str(shapes), "--json"))
    (row,) = document["problems"]
    assert 0 < row["first"] <= 1 and 0 < row["five"] <= 1 and 0 < row["default"] <= 1
    assert row["exhaustive_seconds"] > 0 and row["configs"] > 5


@pytest.mark.parametrize(
    "arguments",
    [(), ("matmul", "40x48"), ("matmul", "axbxc"), ("matmul", "4x4x4", "--set", "layout"), ("no such model",)],
)
def test_what_cannot_be_tuned_is_one_sentence(arguments: tuple[str, ...]):
    from tilewise.errors import TilewiseError

    app = typer.Typer()
    app.command()(tune)
    result = CliRunner().invoke(app, list(arguments))
    assert isinstance(result.exception, TilewiseError) and str(result.exception)


def test_a_tile_is_printed_as_python_takes_it_and_its_json_are_the_arguments(tmp_path: Path):
    arguments = ("matmul", "40x48x56", "--cache", str(tmp_path), "--budget", "1")
    (text, *_), fields = run(*arguments).splitlines(), json.loads(run(*arguments, "--json"))["config"]
    tile = TileConfig(**fields)
    assert text == repr(tile)
    a, b = np.ones((40, 56), np.float32), np.ones((56, 48), np.float32)
    assert np.array_equal(matmul_native(a, b, tile=tile), matmul_native(a, b))
    assert repr(tile_space("matmul", (40, 48, 56))[0]) in str(OptimizedBackend().explain("matmul", a, b))


@pytest.mark.parametrize(("typed", "intended"), [("matmull", "matmul"), ("conv2", "conv2d"), ("cnnn", "cnn")])
@pytest.mark.parametrize("sizes", [(), ("64x64x64",)])
def test_a_misspelt_family_or_model_names_the_near_one(typed: str, intended: str, sizes: tuple[str, ...]):
    if sizes and intended == "cnn":
        pytest.skip("a model has no sizes")
    with pytest.raises(ConfigurationError, match=f"did you mean '{intended}'"):
        tune(typed, *sizes)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("64x96x80", "matmul"), "the family comes before its sizes: tilewise tune matmul 64x96x80"),
        (("64x96x80",), "tilewise tune matmul 64x96x80"),
        (("mlp", "64x64x64"), "mlp is a model and takes no sizes"),
        (("matmull", "64x64x64"), "did you mean 'matmul'"),
    ],
)
def test_words_in_the_wrong_place_are_put_right_by_the_sentence(words: tuple[str, ...], sentence: str):
    app = typer.Typer()
    app.command()(tune)
    with pytest.raises(ConfigurationError, match=sentence):
        CliRunner().invoke(app, list(words), catch_exceptions=False)
