"""Workers, backups and the command line over a real board."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

from click.testing import CliRunner

from tests.bench.test_board import filled, made_up_score, recipe
from tilewise._extension import native
from tilewise.bench import Rejected, Settings, parse_recipe
from tilewise.bench.scoring import duel
from tilewise.cli.app import command_line
from tilewise.errors import ConfigurationError, FileFormatError
from tilewise_arena.board import open_board, verify
from tilewise_arena.board.backup import back_up, restore
from tilewise_arena.sandbox import bubblewrap
from tilewise_arena.worker import consider_record, rerun_plugin, run_one


def test_a_worker_scores_what_waits_and_rejects_what_is_wrong(tmp_path: Path, quick: Settings) -> None:
    with open_board(tmp_path / "b.sqlite") as board:
        bad = parse_recipe({"tilewise": 1, "event": "MLP_SPRINT", "steps": [{"step": "prune", "sparsity": 0.95}]})
        with board.write() as transaction:
            good = transaction.submit("owls", recipe())["entry"]
            wrong = transaction.submit("rooks", bad.as_dict())["entry"]
        assert [run_one(board, quick), run_one(board, quick), run_one(board, quick)] == [good, wrong, None]
        entry, other = board.entry(good), board.entry(wrong)
        assert entry is not None and other is not None
        assert entry["status"] == "scored" and entry["record"] and entry["verified"]
        assert other["status"] == "rejected" and "below the floor" in other["reason"]
        assert verify(board).good


def test_a_rejection_shows_nothing_of_the_machine(tmp_path: Path, quick: Settings) -> None:
    steps = [{"step": "weights", "file": "mine/w.safetensors"}]
    content = parse_recipe({"tilewise": 1, "event": "MLP_SPRINT", "steps": steps}).as_dict()
    with open_board(tmp_path / "b.sqlite") as board:
        with board.write() as transaction:
            number = transaction.submit("owls", content, {"mine/w.safetensors": b"no weights"})["entry"]
        run_one(board, quick)
        entry = board.entry(number)
        assert entry is not None and entry["status"] == "rejected"
        assert "w.safetensors" in entry["reason"] and "/" not in entry["reason"]


def test_a_slower_entry_does_not_take_the_record(tmp_path: Path, quick: Settings) -> None:
    with open_board(tmp_path / "b.sqlite") as board:
        first, second = filled(board, 2)
        with board.write() as transaction:
            transaction.record(second, 0.0, 1.0, None)
        assert not consider_record(board, first, quick)
        assert board.record("MLP_SPRINT", "closed") == second


def test_a_duel_of_an_entry_with_itself_is_not_won(quick: Settings) -> None:
    same = parse_recipe(recipe())
    assert not duel(same, same, quick)["beaten"]
    if native is None:
        return  # every backend is NumPy then
    plain = parse_recipe({"tilewise": 1, "event": "MLP_SPRINT", "steps": [{"step": "backend", "name": "numpy"}]})
    won = duel(same, plain, quick)
    assert won["beaten"] and won["p_value"] < 0.01


@pytest.mark.skipif(bool(bubblewrap.unavailable_reason()), reason=bubblewrap.unavailable_reason())
def test_an_open_entry_is_verified_by_a_run_of_the_owner(tmp_path: Path, quick: Settings) -> None:
    plugin = b"import numpy as np\ndef load(event, folder):\n    return lambda x: np.zeros((len(x), 10), np.float32)\n"
    with open_board(tmp_path / "b.sqlite") as board:
        with board.write() as transaction:
            number = transaction.submit("owls", recipe(), {}, "open", plugin)["entry"]
        score = rerun_plugin(board, number, settings=replace(quick, runs=12))
        assert score["status"] == "rejected"
        with pytest.raises(ConfigurationError, match="open division"):
            rerun_plugin(board, 999)


def test_a_backup_restores_to_the_same_board(tmp_path: Path) -> None:
    with open_board(tmp_path / "b.sqlite") as board:
        numbers = filled(board)
        with board.write() as transaction:
            transaction.record(numbers[0], 0.0, 1.0, None)
            transaction.disqualify(numbers[1], "because it is")
            transaction.set_open("MLP_SPRINT", False)
        entries = [board.entry(n) for n in numbers]
        back_up(board, tmp_path / "backup.jsonl")
    assert (tmp_path / "backup.jsonl").stat().st_mode & 0o077 == 0
    restore(tmp_path / "backup.jsonl", tmp_path / "new.sqlite")
    with open_board(tmp_path / "new.sqlite", create=False) as again:
        assert [again.entry(n) for n in numbers] == entries
        assert verify(again).good and verify(again).sealed
        with again.write() as transaction:
            transaction.set_open("MLP_SPRINT", True)
            transaction.submit("owls", recipe("later"))
        assert verify(again).good


def test_an_altered_or_cut_backup_is_not_restored(tmp_path: Path) -> None:
    with open_board(tmp_path / "b.sqlite") as board:
        filled(board)
        back_up(board, tmp_path / "backup.jsonl")
    text = (tmp_path / "backup.jsonl").read_text()
    (tmp_path / "altered.jsonl").write_text(text.replace("team 2", "team 7"))
    with pytest.raises(Rejected, match="does not hold a whole board"):
        restore(tmp_path / "altered.jsonl", tmp_path / "x.sqlite")
    (tmp_path / "cut.jsonl").write_text(text[: len(text) // 2])
    with pytest.raises(FileFormatError, match="cut short"):
        restore(tmp_path / "cut.jsonl", tmp_path / "y.sqlite")
    with pytest.raises(ConfigurationError, match="empty board"):
        restore(tmp_path / "backup.jsonl", tmp_path / "b.sqlite")


def test_the_command_line_keeps_a_board(tmp_path: Path) -> None:
    path = str(tmp_path / "b.sqlite")
    with open_board(path) as board:
        number = board.add_scored("owls", parse_recipe(recipe()), made_up_score())["entry"]

    def run(*words: str, code: int = 0) -> Any:
        result = CliRunner().invoke(command_line(), ["compete", *words, "--board", path])
        assert result.exit_code == code, result.output
        return result.stdout

    assert json.loads(run("board", "--json"))["MLP_SPRINT"][0]["id"] == number
    token = run("token", "create", "owls").strip()
    assert token.split("_")[1] in run("token", "list")
    run("token", "revoke", token)
    run("event", "MLP_SPRINT", "close")
    run("disqualify", str(number), "it was a test")
    assert run("grades").startswith("event,")
    run("backup", str(tmp_path / "out.jsonl"))
    assert "whole" in run("verify")
    import sqlite3

    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("UPDATE entries SET team = 'rooks'")
    assert "shows another team" in run("verify", code=1)
