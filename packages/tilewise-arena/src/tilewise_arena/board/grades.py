"""Grades: the best verified entry of every team in every event, as CSV that opens safely in a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tilewise.bench.events import TinyMLPerf
from tilewise_arena.board.store import Board, readable

COLUMNS = ("event", "division", "rank", "team", "score", "entry", "name", "submitted_at", "record")


def grades_csv(board: Board) -> str:
    """Format one CSV line per team, event and division, best first."""
    rows: list[Sequence[Any]] = [COLUMNS]
    kinds = [(event.name, division) for event in TinyMLPerf.events() for division in ("closed", "open")]
    with readable(board):
        for event, division in kinds:
            for rank, row in best_entries(board, event, division):
                facts = (event, division, rank, safe(row["team"]), f"{row['score']:.4f}", row["id"])
                rows.append((*facts, safe(row["name"]), row["submitted_at"], "yes" if row["record"] else ""))
    return as_csv(rows)


def as_csv(rows: Iterable[Sequence[Any]]) -> str:
    """Format rows as CSV."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(rows)
    return stream.getvalue()


def best_entries(board: Board, event: str, division: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Return the best scored entry of every team with its rank among these."""
    yield from enumerate(board.best_of_teams(event, division), 1)


def safe(text: str) -> str:
    """Quote a cell that a spreadsheet would take for a formula, also after spaces."""
    return f"'{text}" if text.lstrip()[:1] in tuple("=+-@\t\r＝＋－＠") and text.strip() else text
