"""The local leaderboard file: entries come back ranked, edits are noticed, and a class's board needs the add-on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.bench.test_board import made_up_score, recipe
from tilewise.bench.leaderboard import LocalLeaderboard
from tilewise.bench.recipe import parse_recipe
from tilewise.errors import FileFormatError, MissingFileError, UnavailableError


@pytest.fixture
def board(tmp_path: Path) -> LocalLeaderboard:
    """A leaderboard with three entries whose scores are 2, 4 and 3."""
    board = LocalLeaderboard(tmp_path / "leaderboard.jsonl")
    for team, score in (("owls", 2.0), ("rooks", 4.0), ("larks", 3.0)):
        board.add(team, parse_recipe(recipe(team)), made_up_score(score))
    return board


def test_entries_are_ranked_by_score(board: LocalLeaderboard) -> None:
    rows = board.standings("MLP_SPRINT")
    assert [(row["rank"], row["team"]) for row in rows] == [(1, "rooks"), (2, "larks"), (3, "owls")]
    assert rows[0]["record"] and not rows[1]["record"]
    assert board.standings("CNN_MARATHON") == [] and len(board.standings("MLP_SPRINT", limit=2)) == 2


def test_a_receipt_is_the_hash_of_the_last_line(board: LocalLeaderboard) -> None:
    receipt = board.add("wrens", parse_recipe(recipe("wrens")), made_up_score(1.5))
    assert receipt["entry"] == 4 and receipt["hash"] == json.loads(board.path.read_text().splitlines()[-1])["hash"]


@pytest.mark.parametrize("edit", [lambda e: e["result"].update(score=99.0), lambda e: e.update(team="me")])
def test_an_edited_entry_is_noticed(board: LocalLeaderboard, edit) -> None:
    lines = board.path.read_text().splitlines()
    entry = json.loads(lines[1])
    edit(entry)
    lines[1] = json.dumps(entry)
    board.path.write_text("\n".join(lines) + "\n")
    with pytest.raises(FileFormatError, match="line 2: the entry was edited"):
        board.standings("MLP_SPRINT")


def test_a_removed_entry_is_noticed(board: LocalLeaderboard) -> None:
    lines = board.path.read_text().splitlines()
    board.path.write_text("\n".join([lines[0], lines[2]]) + "\n")
    with pytest.raises(FileFormatError, match="line 2"):
        board.standings("MLP_SPRINT")


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="does not exist"):
        LocalLeaderboard(tmp_path / "none.jsonl").standings("MLP_SPRINT")


def test_without_the_add_on_a_database_board_says_what_to_install() -> None:
    from tilewise._addons import require

    with pytest.raises(
        UnavailableError, match="a board needs tilewise-absent: in a clone, pip install packages/tilewise-absent"
    ):
        require("tilewise_absent.board", "a board")


@pytest.mark.parametrize(
    ("words", "package"),
    [("compete serve", "arena"), ("compete token list", "arena"), ("serve", "fleet"), ("fleet up", "fleet")],
)
def test_a_command_of_an_absent_add_on_says_what_to_install(words: str, package: str) -> None:
    import subprocess

    code = (
        "import importlib.metadata as m, sys\n"
        "m.entry_points = lambda **_: []\n"
        f"sys.argv = ['tilewise', *{words.split()!r}]\n"
        "from tilewise.cli.app import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (
        done.returncode == 2
        and f"pip install packages/tilewise-{package}" in done.stderr
        and "Traceback" not in done.stderr
    )
