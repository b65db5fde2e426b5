"""Grades and rosters as CSV that opens safely in a spreadsheet: of every team, or of every student of a class.

A roster is who is in which team; tokens are made from it, and grades are given by it. The file has a heading with a
column `name`, and may have `team` (a student without one is a team of their own) and others, such as a number, which
come back beside the grades as they are.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tilewise._files import read_text_input
from tilewise.bench.events import TinyMLPerf
from tilewise.bench.submission import check_team
from tilewise.errors import FileFormatError
from tilewise_arena.board.store import Board, readable
from tilewise_arena.board.tokens import create_token

COLUMNS = ("event", "division", "rank", "team", "score", "entry", "name", "submitted_at", "record")


def grades_csv(board: Board) -> str:
    """Format the best entry of each team, event and division as CSV, best first."""
    rows: list[Sequence[Any]] = [COLUMNS]
    kinds = [(event.name, division) for event in TinyMLPerf.events() for division in ("closed", "open")]
    with readable(board):
        for event, division in kinds:
            for rank, row in best_entries(board, event, division):
                facts = (event, division, rank, safe(row["team"]), f"{row['score']:.4f}", row["id"])
                rows.append((*facts, safe(row["name"]), row["submitted_at"], "yes" if row["record"] else ""))
    return as_csv(rows)


def as_csv(rows: Iterable[Sequence[Any]]) -> str:
    """Format rows of cells as CSV text."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(rows)
    return stream.getvalue()


def best_entries(board: Board, event: str, division: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (rank, entry) of the best scored entry of every team, best first."""
    yield from enumerate(board.best_of_teams(event, division), 1)


def safe(text: str) -> str:
    """Quote a CSV cell that a spreadsheet would execute as a formula."""
    return f"'{text}" if text.lstrip()[:1] in tuple("=+-@\t\r＝＋－＠") and text.strip() else text


_MOST_BYTES, _MOST_ROWS = 4 << 20, 10_000
Student = dict[str, str]


def read_roster(path: Path) -> list[Student]:
    """Read the students of a file, each with a name and a team."""
    rows = csv.DictReader(io.StringIO(read_text_input(path, _MOST_BYTES)), restkey="", strict=True)
    try:
        if "name" not in (rows.fieldnames or ()):
            raise FileFormatError(f"{path} has no column `name` in its first line (columns are separated by commas).")
        students = [_student(row, path, at) for at, row in enumerate(rows, 2)]
    except csv.Error as error:
        raise FileFormatError(f"{path} is not CSV: {error}.") from None
    if not 0 < len(students) <= _MOST_ROWS:
        raise FileFormatError(f"{path} has {len(students)} students, and a class has 1 to {_MOST_ROWS:,}.")
    return students


def _student(row: dict[str, str | None], path: Path, line: int) -> Student:
    """Check one line of a roster; a student without a team forms one alone."""
    facts = {key: (value or "").strip() for key, value in row.items() if key and isinstance(value, str | None)}
    if not facts["name"]:
        raise FileFormatError(f"Line {line} of {path} has no name.")
    facts["team"] = facts.get("team") or facts["name"]
    try:
        check_team(facts["team"])
    except ValueError as error:
        raise FileFormatError(f"Line {line} of {path}: {error}.") from None
    return facts


def make_tokens(board: Board, students: Iterable[Student], by: str = "") -> dict[str, str]:
    """Create a token for every team of the class that has none yet; returns the tokens by team."""
    teams_with_token = {row["team"] for row in board.teams() if row["revoked_at"] is None and row["role"] == "team"}
    teams = dict.fromkeys(student["team"] for student in students)
    return {team: create_token(board, team, by=by) for team in teams if team not in teams_with_token}


def tokens_csv(students: Iterable[Student], tokens: dict[str, str]) -> str:
    """Return a CSV of students, teams and new tokens; teams that had a token already are left out."""
    rows = [(safe(s["name"]), safe(s["team"]), tokens[s["team"]]) for s in students if s["team"] in tokens]
    return as_csv([("name", "team", "token"), *rows])


def class_grades_csv(board: Board, students: Iterable[Student]) -> str:
    """Return a CSV with a line per student: roster columns, then the team's rank, score and status in each event.

    The columns are the same before anybody has scored: those of the closed division, and of the open one if it is used.
    """
    students = list(students)
    columns = list(dict.fromkeys(key for student in students for key in student))
    contests = [(e.name, d) for e in TinyMLPerf.events() for d in ("closed", "open")]
    best = {key: {r["team"]: (rank, r["score"]) for rank, r in best_entries(board, *key)} for key in contests}
    statuses = board.team_statuses()
    contests = [c for c in contests if c[1] == "closed" or best[c] or any(key[1:] == c for key in statuses)]
    heading = [f"{event} {division} {what}" for event, division in contests for what in ("rank", "score", "status")]
    rows: list[tuple[str, ...]] = [(*columns, *heading)]
    for student in students:
        figures: list[str] = []
        for contest in contests:
            rank, score = best[contest].get(student["team"], ("", ""))
            status = "scored" if score != "" else statuses.get((student["team"], *contest), "no entry")
            figures += [str(rank), score if isinstance(score, str) else f"{score:.4f}", status]
        rows.append((*(safe(student.get(key, "")) for key in columns), *figures))
    return as_csv(rows)
