"""Every edit of a board's database that changes a rank, a grade, a role or the queue is noticed by `verify`.

Edits are drawn from the schema: every column of every table gets other values, rows are swapped, copied and deleted.
An edit that `verify` does not notice must leave everything that people see or get as it was.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

from tests.bench.test_board import filled, made_up_score, recipe
from tilewise.bench import TinyMLPerf, parse_recipe
from tilewise.errors import TilewiseError
from tilewise.web.tokens import public_name
from tilewise_arena.board import Board, open_board, schema, verify
from tilewise_arena.board.grades import grades_csv
from tilewise_arena.board.sessions import open_session, session_holder
from tilewise_arena.board.tokens import create_token, holder_of, revoke_token
from tilewise_arena.board.transactions import DIVISIONS

VALUES = ("'other'", "NULL", "2", "(SELECT max({column}) FROM {table})")
COLUMNS = [(table.name, column.name) for table in schema.metadata.sorted_tables for column in table.columns]
EDITS = [f"UPDATE {t} SET {c} = {v.format(column=c, table=t)}" for t, c in COLUMNS for v in VALUES]
EDITS += [f"UPDATE {t} SET {c} = {c} + 1 WHERE rowid = (SELECT min(rowid) FROM {t})" for t, c in COLUMNS]
# A deleted session signs a teacher out, which changes nothing else.
EDITS += [f"DELETE FROM {t} WHERE rowid = (SELECT {which}(rowid) FROM {t})"
          for t in schema.metadata.tables if t != "sessions" for which in ("min", "max")]  # fmt: skip
EDITS += [f"UPDATE entries SET {c} = (SELECT o.{c} FROM entries o WHERE o.id = 3 - entries.id) WHERE id < 3"
          for c in ("team", "score", "result", "recipe", "status", "link")]  # fmt: skip
EDITS += [
    "UPDATE entries SET record = 2 WHERE record",
    "CREATE UNIQUE INDEX once ON entries (team)",
    "CREATE UNIQUE INDEX mine ON entries (event) WHERE team = 'rooks'",
    "ALTER TABLE entries ADD COLUMN extra INTEGER CHECK (team != 'rooks')",
    "CREATE TRIGGER mine AFTER INSERT ON entries BEGIN UPDATE entries SET score = 99; END",
    "CREATE TEMP TABLE mine AS SELECT * FROM entries",
    # An index with scores of its own, which pages read instead of the table.
    "UPDATE entries SET score = 99 WHERE id = 1; REINDEX; PRAGMA writable_schema = ON;"
    "CREATE TABLE aside AS SELECT * FROM sqlite_master WHERE type = 'index' AND tbl_name = 'entries' AND sql NOT NULL;"
    "DELETE FROM sqlite_master WHERE name IN (SELECT name FROM aside); PRAGMA writable_schema = RESET;"
    "UPDATE entries SET score = (SELECT score FROM copy WHERE id = 1) WHERE id = 1; PRAGMA writable_schema = ON;"
    "INSERT INTO sqlite_master SELECT * FROM aside; DROP TABLE aside",
]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A board with entries in every state, tokens of every kind, a session, and a copy of its entries."""
    path = tmp_path_factory.mktemp("board") / "board.sqlite"
    with open_board(path) as board:
        numbers = filled(board, 3)
        secrets = {team: create_token(board, team, admin=team == "ada") for team in ("ada", "owls", "gone")}
        revoke_token(board, public_name(secrets["gone"]))
        secrets["cookie"] = open_session(board, public_name(secrets["ada"]), 1e6)
        weights = parse_recipe({"tilewise": 1, "event": "MLP_SPRINT", "steps": [{"step": "weights", "file": "w"}]})
        with board.write() as transaction:
            transaction.record(numbers[1], 0.0, 1.0, None)
            transaction.submit("owls", weights.as_dict(), {"w": b"weights"})
            for team in ("rooks", "crows", "wrens"):
                transaction.submit(team, recipe(team))
            transaction.disqualify(transaction.submit("jays", recipe("jays"))["entry"], "two members in two teams")
            transaction.set_open("TILE_OLYMPIAD", False)
            transaction.claim_job("worker", 3)
        open_entry = {"tilewise": 1, "event": "MLP_SPRINT", "name": "p"}
        with board.write() as transaction:
            number = transaction.submit("owls", open_entry, division="open", plugin=b"print()")["entry"]
            transaction.result(number, "scored", made_up_score(3.0).as_dict())
    return path, secrets


def visible(board: Board, secrets: dict[str, str]) -> list[Any]:
    """Return what people see of a board and get from it: places, grades, roles, sessions, and who runs next."""
    events = [event.name for event in TinyMLPerf.events()]
    pages: list[Any] = [board.standings(event, division) for event in events for division in DIVISIONS]
    pages += [board.record(event, division) for event in events for division in DIVISIONS]
    pages += [board.entries(status=status) for status in (None, "scored", "queued", "disqualified")]
    pages += [grades_csv(board), board.open_events(), board.waiting(), session_holder(board, secrets["cookie"])]
    pages += [holder_of(board, secrets[team]) for team in ("ada", "owls", "gone")]
    pages += [board.files(row["id"]) for row in board.entries()]
    with pytest.raises(InterruptedError), board.write() as transaction:
        pages += [transaction.claim_job(f"worker {at}", 3) for at in range(4)]
        pages += [transaction.submit("rooks", recipe("another"))["entry"]]
        raise InterruptedError  # nothing of this is kept
    return pages


def test_there_are_sixty_edits() -> None:
    assert len(set(EDITS)) >= 60


def test_an_edit_that_changes_anything_visible_is_noticed(
    original: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    path, secrets = original
    with open_board(path) as board:
        before = visible(board, secrets)
        assert verify(board).good
    content, key = path.read_bytes(), path.with_name("board.sqlite.key")
    missed = []
    for number, edit in enumerate(EDITS):
        altered = tmp_path / f"{number}.sqlite"
        altered.write_bytes(content)
        connection = sqlite3.connect(altered, isolation_level=None)
        connection.executescript("DROP TRIGGER ledger_no_update; DROP TRIGGER ledger_no_delete")
        connection.executescript("CREATE TEMP TABLE copy AS SELECT id, score FROM entries")
        try:
            connection.executescript(edit)
        except sqlite3.Error:
            continue  # the database itself refuses it
        finally:
            connection.close()
        try:
            with open_board(altered, create=False, key=key) as board:
                if verify(board).good and visible(board, secrets) != before:
                    missed.append(edit)
        except TilewiseError:
            continue  # the board cannot be used
    assert missed == []
