"""Readers of the competition: recipes, rosters, backups and boards themselves, damaged."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path


def made_board(folder: Path) -> Path:
    """A board with a token, a queued and a scored entry and a record."""
    from tests.bench.test_board import filled, recipe
    from tilewise_arena.board import open_board
    from tilewise_arena.board.backup import back_up
    from tilewise_arena.board.tokens import create_token

    with open_board(folder / "good.sqlite") as board:
        create_token(board, "owls")
        numbers = filled(board, 2)
        with board.write() as transaction:
            transaction.record(numbers[0], 0.001, 1.1, None)
            transaction.submit("rooks", recipe("waits"))
        back_up(board, folder / "backup.jsonl")
    return folder / "good.sqlite"


def made_leaderboard(folder: Path) -> Path:
    """A leaderboard file with two scored entries."""
    from tests.bench.test_board import made_up_score, recipe
    from tilewise.bench.leaderboard import LocalLeaderboard
    from tilewise.bench.recipe import parse_recipe

    board = LocalLeaderboard(folder / "leaderboard.jsonl")
    for number in range(2):
        board.add(f"team {number}", parse_recipe(recipe(f"r{number}")), made_up_score(2.0 + number))
    return board.path


def use_leaderboard(path: Path) -> object:
    from tilewise.bench.leaderboard import LocalLeaderboard

    return LocalLeaderboard(path).standings("MLP_SPRINT")


def use_backup(folder: Path) -> Callable[[Path], object]:
    def use(path: Path) -> object:
        from tilewise_arena.board.backup import restore

        for old in folder.glob("new.sqlite*"):
            old.unlink()
        return restore(path, folder / "new.sqlite")

    return use


def use_board(path: Path) -> None:
    """What a teacher's commands read."""
    from tilewise_arena.board import open_board, verify
    from tilewise_arena.board.grades import grades_csv

    for log in (path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
        log.unlink(missing_ok=True)
    with open_board(path, create=False, key=path.parent / "good.sqlite.key") as board:
        verify(board)
        grades_csv(board)
        board.teams()
        for row in board.standings("MLP_SPRINT", "closed"):
            board.entry(row["id"])
            with tempfile.TemporaryDirectory() as written:
                board.recipe(row["id"], Path(written))
        board.records("MLP_SPRINT", "closed")


def use_recipe(path: Path) -> object:
    from tilewise.bench import read_recipe

    return read_recipe(path).as_dict()


def use_roster(path: Path) -> object:
    from tilewise_arena.board.grades import read_roster

    return read_roster(path)


RECIPE = json.dumps(
    {
        "tilewise": 1,
        "event": "CNN_MARATHON",
        "name": "mine",
        "steps": [
            {"step": "backend", "name": "native"},
            {"step": "prune", "sparsity": 0.5, "epochs": 1},
            {"step": "quantize", "observer": "mse", "samples": 64, "keep_float": ["a"]},
        ],
    }
)
ROSTER = "number,name,team\n7,Ada,owls\n8,Grace,owls\n9,Edsger,\n"
