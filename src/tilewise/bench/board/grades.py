"""Grades: the best verified entry of every team in every event, as CSV that opens safely in a spreadsheet."""

from __future__ import annotations

import csv
import io

from tilewise.bench.board import Board
from tilewise.bench.events import TinyMLPerf

COLUMNS = ("event", "division", "rank", "team", "score", "entry", "name", "submitted_at", "record")


def grades_csv(board: Board) -> str:
    """One line per team, event and division, best first."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for event in TinyMLPerf.events():
        for division in ("closed", "open"):
            seen: set[str] = set()
            for row in board.entries(event.name, division, "scored", limit=100_000):
                if row["team"] in seen:
                    continue
                seen.add(row["team"])
                facts = (event.name, division, len(seen), _safe(row["team"]), f"{row['score']:.4f}", row["id"])
                writer.writerow((*facts, _safe(row["name"]), row["submitted_at"], "yes" if row["record"] else ""))
    return stream.getvalue()


def _safe(text: str) -> str:
    """A spreadsheet takes a cell that begins so for a formula."""
    return f"'{text}" if text[:1] in "=+-@\t" and text else text
