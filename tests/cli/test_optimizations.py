"""The commands that show an optimization: they run on embedded data, say what they measured, and leave whole files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tilewise.cli import commands
from tilewise.cli.pictures import BLUE, picture
from tilewise.errors import TilewiseError

RUNNER = CliRunner()


def run(*arguments: str) -> str:
    app = typer.Typer()
    commands.register(app)
    result = RUNNER.invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_quantize_reports_accuracy_size_and_layers(tmp_path: Path) -> None:
    facts = json.loads(run("quantize", "cnn", "--runs", "12", "--batch", "8", "--out", str(tmp_path), "--json"))
    before, after = facts["models"]
    assert after["bytes_in_memory"] < 0.3 * before["bytes_in_memory"]
    assert after["accuracy"] > 0.97 and after["drop_interval"][0] <= after["drop_points"] <= after["drop_interval"][1]
    assert {layer["form"] for layer in facts["layers"]} == {"int8"}
    assert (tmp_path / "cnn-int8.safetensors").is_file() and (tmp_path / "ranges.png").is_file()


@pytest.mark.parametrize(
    "options", [("--sparsity", "0.7", "--epochs", "5"), ("--structured", "--sparsity", "0.3", "--epochs", "1")]
)
def test_prune_reports_what_it_removed(tmp_path: Path, options: tuple[str, ...]) -> None:
    facts = (
        json.loads(run("prune", "mlp", *options, "--runs", "12", "--out", str(tmp_path), "--json"))
        if ("--structured" not in options)
        else json.loads(run("prune", "cnn", *options, "--runs", "12", "--batch", "8", "--out", str(tmp_path), "--json"))
    )
    before, after, *_ = facts["models"]
    # A layer that was timed to be faster dense keeps its zeros; so do all of them without the kernels.
    if "--structured" in options or any("runs sparse" in note for note in facts["notes"]):
        assert after["bytes_in_memory"] < before["bytes_in_memory"]
    assert after["accuracy"] > 0.8


def test_prune_removes_units_of_a_network_without_convolutions(tmp_path: Path) -> None:
    options = ("--structured", "--epochs", "1", "--runs", "12", "--out", str(tmp_path), "--json")
    dense, smaller = json.loads(run("prune", "mlp", *options))["models"]
    assert smaller["name"] == "units removed" and smaller["bytes_in_memory"] < 0.35 * dense["bytes_in_memory"]


def test_prune_removes_filters_where_sparse_convolutions_are_slower(tmp_path: Path) -> None:
    facts = json.loads(run("prune", "cnn", "--epochs", "1", "--runs", "12", "--out", str(tmp_path), "--json"))
    if [row["name"] for row in facts["models"]] == ["dense", "sparse", "filters removed"]:
        assert facts["models"][2]["bytes_in_memory"] < 0.35 * facts["models"][0]["bytes_in_memory"]
    assert facts["notes"][0].startswith(f"Kept {facts['kept']}")
    assert facts["models"][0]["doubts"] == facts["models"][1]["doubts"]


def test_prune_gpt_without_fine_tuning_shows_the_damage_and_stays_dense(tmp_path: Path) -> None:
    facts = json.loads(
        run("prune", "gpt", "--no-finetune", "--scope", "global", "--runs", "12", "--out", str(tmp_path), "--json")
    )
    dense, sparse = facts["models"]
    assert sparse["drop_interval"][0] > 10 and facts["kept"] == "dense"
    assert sparse["bytes_in_memory"] < 0.6 * dense["bytes_in_memory"] or "runs dense" in str(facts["notes"])


def test_generate_streams_text_and_says_how_fast() -> None:
    facts = json.loads(run("generate", "import ", "--tokens", "20", "--temperature", "0", "--json"))
    plain = json.loads(run("generate", "import ", "--tokens", "20", "--temperature", "0", "--no-cache", "--json"))
    assert facts["tokens"] == plain["tokens"] and len(facts["tokens"]) == 20
    assert "tokens," in run("generate", "import ", "--tokens", "5")


def test_kv_and_ladder_draw_pictures(tmp_path: Path) -> None:
    run("kv", "--model", "gpt:4x128", "--tokens", "12", "--out", str(tmp_path / "kv.png"))
    run("ladder", "--size", "64", "--python-size", "16", "--seconds", "0.01", "--out", str(tmp_path / "ladder.png"))
    assert (tmp_path / "kv.png").stat().st_size > 5000 and (tmp_path / "ladder.png").stat().st_size > 5000


@pytest.mark.parametrize(
    "arguments",
    [
        ("quantize", "gpt"),
        ("quantize", "cnn", "--observer", "guess"),
        ("prune", "cnn", "--sparsity", "2"),
        ("prune", "cnn", "--data", "nowhere"),
        ("generate", "x", "--model", "nowhere.safetensors"),
        ("generate", "x", "--temperature", "-1"),
        ("kv", "--tokens", "100000"),
    ],
)
def test_bad_requests_raise_one_sentence(arguments: tuple[str, ...], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    commands.register(app)
    result = RUNNER.invoke(app, list(arguments))
    assert isinstance(result.exception, TilewiseError) and "\n" not in str(result.exception)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("profile", "mine.py"), "profile it with --script mine.py"),
        (("profile", "resnet-18"), "did you mean 'resnet18'"),
        (("generate", ""), "the prompt is empty"),
    ],
)
def test_what_cannot_be_done_is_said_and_not_claimed(
    words: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TilewiseError, match=sentence):
        run(*words)


def test_a_prompt_can_come_from_standard_input() -> None:
    app = typer.Typer()
    commands.register(app)
    done = RUNNER.invoke(app, ["generate", "-", "--tokens", "3"], input="def f\n", catch_exceptions=False)
    assert done.output.startswith("def f")


def test_without_matplotlib_a_command_says_so_and_keeps_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tilewise.cli.pictures.find_spec", lambda _name: None)
    with picture(tmp_path / "none.png", columns=2) as (left, right):
        left.plot([1, 2], color=BLUE)
        for bar in right.bar(["a"], [1.0]):
            bar.set(height=2)
    assert "tilewise[plots]" in capsys.readouterr().err and not list(tmp_path.iterdir())
