"""Promises of `tilewise machine` and `tilewise profile`."""

from __future__ import annotations

import json

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from tilewise import get_num_threads, models, set_num_threads
from tilewise.cli import commands
from tilewise.errors import TilewiseError
from tilewise.io import save
from tilewise.models.saved import load_saved
from tilewise.profile import machine as machine_module


@pytest.fixture
def run(monkeypatch, tmp_path, ceilings):
    """Run the command line in this process, with made-up ceilings in place of probes."""
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(machine_module, "measure_machine", lambda: ceilings)
    app = typer.Typer()
    commands.register(app)
    threads = get_num_threads()
    yield lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=True)
    set_num_threads(threads)


def test_machine_prints_tables_or_json_and_draws(run, tmp_path):
    assert "100 GFLOP/s" in run("machine").stdout
    assert json.loads(run("machine", "--json").stdout)["fresh_memory"] == 2e9
    assert run("machine", "--plot", tmp_path / "roof.svg").exit_code == 0
    assert (tmp_path / "roof.svg").read_text().count("<svg") == 1
    assert isinstance(run("machine", "--plot", tmp_path / "roof.nonsense").exception, TilewiseError)


def test_profile_of_a_model_reports_and_writes(run, tmp_path):
    result = run(
        "profile", "mlp", "--batch", 4, "--repeat", 2, "--html", tmp_path / "p.html", "--trace", tmp_path / "t.json"
    )
    assert result.exit_code == 0
    assert "Bottleneck: " in result.stdout and "Time of one call" in result.stdout
    assert "leak" in result.stdout and "leak: " not in result.stdout  # none, or too few calls on a busy machine
    assert (tmp_path / "p.html").exists()
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_profile_as_json_is_only_json(run, tmp_path):
    result = run("profile", "mlp", "--batch", 2, "--repeat", 1, "--backward", "--json", "--html", tmp_path / "p.html")
    data = json.loads(result.stdout)
    assert data["flops"] > 0 and data["timing"]["p50"] > 0 and data["memory"]["peak_bytes"] > 0
    assert any(unit["phase"] == "backward" for unit in data["units"])


def test_profile_on_another_backend(run):
    data = json.loads(run("profile", "mlp", "--batch", 2, "--repeat", 1, "--backend", "numpy", "--json").stdout)
    assert set(data["by_op"]["matmul"]["backends"]) == {"numpy"}


SIZES = {
    "mlp": [{}, {"inputs": 20, "classes": 3}],
    "cnn": [{}, {"channels": 3, "size": 28, "classes": 7}],
    "vgg6": [{}],
    "resnet8": [{}],
    "gpt": [{}, {"size": "4x128", "vocab": 11, "context": 32}],
}


@pytest.mark.parametrize(("name", "sizes"), [(name, sizes) for name, several in SIZES.items() for sizes in several])
def test_a_saved_model_of_any_size_is_recognised_by_its_tensors(name, sizes, tmp_path):
    model = getattr(models, name)(**sizes, seed=3)
    save(model, tmp_path / "m.safetensors")
    model_name, loaded = load_saved(tmp_path / "m.safetensors")
    assert model_name == name
    ours, theirs = dict(model.named_tensors()), dict(loaded.named_tensors())
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[key].data, theirs[key].data) for key in ours)


def test_a_file_with_another_model_is_refused(tmp_path):
    save({"x": np.ones(3, np.float32)}, tmp_path / "m.safetensors")
    with pytest.raises(TilewiseError, match="not one of the reference models"):
        load_saved(tmp_path / "m.safetensors")


def test_profile_of_a_script(run, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "import sys\nfrom tilewise import Tensor\nassert __name__ == '__main__' and sys.argv[1:] == ['a', 'b']\n"
        "Tensor([[1.0, 2.0]]).exp()\nsys.exit(3)\n"
    )
    result = run("profile", "--script", script, "--arg", "a", "--arg", "b")
    assert result.exit_code == 3
    assert "exp" in result.stdout and "exit code 3" in result.stdout


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("", 0),
        ("sys.exit()", 0),
        ("sys.exit(0)", 0),
        ("sys.exit(7)", 7),
        ("sys.exit('no data')", 1),
        ("sys.exit(-1)", 255),
    ],
)
def test_the_exit_code_is_the_scripts_and_the_report_is_whole(run, tmp_path, ending, code):
    script = tmp_path / "mine.py"
    script.write_text(f"import sys\nfrom tilewise import Tensor\nTensor([[1.0, 2.0]]).exp()\n{ending}\n")
    result = run("profile", "--script", script, "--json", "--trace", tmp_path / "t.json")
    assert result.exit_code == code
    data = json.loads(result.stdout)
    assert data["exit_code"] == code and "exp" in data["by_op"] and (tmp_path / "t.json").exists()
    assert ("no data" in data["note"]) == ("no data" in ending)


@pytest.mark.parametrize(
    ("text", "message"),
    [("x = 1\n1 / 0\n", "line 2 raised ZeroDivisionError"), ("def (\n", "SyntaxError"), (None, "there is no script")],
)
def test_a_script_that_fails_is_one_sentence(run, tmp_path, text, message):
    script = tmp_path / "mine.py"
    if text is not None:
        script.write_text(text)
    error = run("profile", "--script", script).exception
    assert isinstance(error, TilewiseError) and message in str(error)


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["mlp", "--script", "x.py"], ["mlp", "--backend", "abacus"]])
def test_nonsense_is_one_sentence(run, arguments):
    assert isinstance(run("profile", *arguments).exception, TilewiseError)


def test_what_a_script_prints_stays_out_of_the_json(run, tmp_path):
    script = tmp_path / "talks.py"
    script.write_text("print('hello')\n")
    result = run("profile", "--script", script, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["title"] == str(script)
