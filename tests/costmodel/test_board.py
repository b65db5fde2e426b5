"""The board: a row for every collection and model, made once, made again when what it tells of changed."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from costmodel.simulated import simulated_kernels
from tilewise.cli.tiles.app import tiles
from tilewise.costmodel.board import board_lines, fill_board, read_board
from tilewise.costmodel.data.writing import kernel_npz
from tilewise.errors import ConfigurationError, FileFormatError

QUICK = {"epochs": 1, "device": "cpu"}


@pytest.fixture
def collection(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))

    def write(name, count=6, seed=0):
        for split, number in (("train", count), ("valid", 3), ("test", 4)):
            folder = tmp_path / name / split
            folder.mkdir(parents=True, exist_ok=True)
            for kernel in simulated_kernels(number, seed=seed + len(split)):
                (folder / f"{kernel.name}.npz").write_bytes(kernel_npz(kernel))
        return str(tmp_path / name)

    return write


def fill(path, tmp_path, collections, models, log_lines):
    return fill_board(path, collections, models, say=log_lines.append, **QUICK)


def test_every_pair_has_a_row_beside_the_baselines_and_is_made_once(collection, tmp_path):
    path, messages = tmp_path / "board.json", []
    one, two = collection("one"), collection("two", seed=9)
    rows = fill(path, tmp_path, [one, two], ["MLP"], messages)
    pairs = {(row["collection"], row["model"]) for row in rows}
    assert {(one, "MLP"), (two, "MLP"), (one, "random"), (two, "default configuration")} <= pairs
    assert messages == [f"{name}: {model}" for name in (one, two) for model in ("MLP", "baselines")]
    messages.clear()
    assert fill(path, tmp_path, [one, two], ["MLP"], messages) == rows and messages == []
    assert len(board_lines(rows)) == len(rows) and read_board(path) == rows


def test_a_row_is_made_again_when_its_collection_changed(collection, tmp_path):
    path, messages = tmp_path / "board.json", []
    one = collection("one")
    before = fill(path, tmp_path, [one], ["MLP"], messages)
    collection("one", count=7, seed=1)
    after = fill(path, tmp_path, [one], ["MLP"], messages)
    assert len(messages) == 4 and len(after) == len(before)
    assert {row["key"] for row in before}.isdisjoint(row["key"] for row in after)


def test_a_model_that_cannot_be_had_is_left_out_with_a_sentence(collection, tmp_path):
    messages = []
    rows = fill(tmp_path / "board.json", tmp_path, [collection("one")], ["shipped"], messages)
    assert {row["model"] for row in rows} >= {"random"} and sum("is skipped" in line for line in messages) == 1


def test_a_name_that_no_model_has_is_said_before_any_work(collection, tmp_path):
    messages = []
    with pytest.raises(ConfigurationError, match="There is no model 'NoSuchModel'"):
        fill(tmp_path / "board.json", tmp_path, [collection("one")], ["GBDT", "NoSuchModel"], messages)
    assert not messages and not (tmp_path / "board.json").exists()


def test_the_command_prints_the_table(collection, tmp_path):
    arguments = ["board", collection("one"), "--models", "MLP", "--epochs", "1", "--out", str(tmp_path / "b.json")]
    done = CliRunner().invoke(tiles, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["board"] == read_board(tmp_path / "b.json")


@pytest.mark.parametrize("text", ["[]", '{"board": 3}', '{"board": [{}]}', '{"board": [[]]}', "{"])
def test_a_file_that_is_no_board_is_one_sentence(tmp_path, text):
    (tmp_path / "board.json").write_text(text)
    with pytest.raises(FileFormatError):
        read_board(tmp_path / "board.json")


def test_a_board_on_which_nothing_could_be_evaluated_is_an_error(collection, tmp_path):
    one = collection("one")
    for file in (tmp_path / "one" / "test").iterdir():
        file.unlink()
    with pytest.raises(ConfigurationError, match="Nothing could be evaluated: The test split"):
        fill(tmp_path / "board.json", tmp_path, [one], ["shipped"], [])
    assert not (tmp_path / "board.json").exists()
