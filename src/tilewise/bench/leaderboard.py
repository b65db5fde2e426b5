"""A leaderboard in one local file: JSON lines, one entry each, chained by hashes.

This is for a person or a small group who trust each other. A class has a board with tokens, sealed ledgers and workers
that re-run entries: the add-on `tilewise-arena`.
"""

from __future__ import annotations

import hashlib
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tilewise._atomic import file_lock
from tilewise._files import parse_json, read_text_input
from tilewise.bench.jsontext import canonical
from tilewise.bench.recipe import Recipe
from tilewise.bench.scoring import Score, check_ranked
from tilewise.errors import FileFormatError, UnavailableError

SUFFIX = ".jsonl"
_MAX_BYTES = 64 << 20  # arbitrary; an entry has about 4 KiB
_FIRST = "0" * 64  # the hash before the first entry
_GAINS = ("speedup", "memory_gain", "size_gain")


class LocalLeaderboard:
    """The entries in one file, which the first submission creates."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def add(self, team: str, recipe: Recipe, score: Score) -> dict[str, Any]:
        """Append a scored entry and return its receipt: number, status, score and hash."""
        check_ranked(score.practice)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with file_lock(self.path):  # two submissions at once would get the same number
                entries = self.entries()
                entry = {
                    "id": len(entries) + 1,
                    "event": recipe.event.name,
                    "team": team,
                    "name": recipe.name,
                    "time": datetime.now(UTC).isoformat(timespec="seconds"),
                    "recipe": recipe.as_dict(),
                    "result": score.as_dict(),
                    "previous": entries[-1]["hash"] if entries else _FIRST,
                }
                entry["hash"] = _hash(entry)
                with self.path.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(entry, default=float) + "\n")
                    stream.flush()
                    os.fsync(stream.fileno())
        except OSError as error:
            raise UnavailableError(f"{self.path} cannot be written ({error.strerror or error}).") from None
        return {"entry": entry["id"], "status": "scored", "score": score.score, "hash": entry["hash"]}

    def entries(self) -> list[dict[str, Any]]:
        """Read every entry in the order of submission; raise an error if a line was damaged or edited."""
        lines = read_text_input(self.path, _MAX_BYTES).splitlines()
        entries = [self._parse_entry(number, line) for number, line in enumerate(lines, 1)]
        previous = _FIRST
        for number, entry in enumerate(entries, 1):
            try:
                intact = entry["previous"] == previous and entry["hash"] == _hash(entry)
            except ValueError:  # NaN, which canonical JSON does not have
                intact = False
            if not intact:
                raise FileFormatError(f"{self.path}, line {number}: the entry was edited after it was written.")
            previous = entry["hash"]
        return entries

    def _parse_entry(self, line_number: int, line: str) -> dict[str, Any]:
        """Parse one line of the file, and check that it has every field of an entry."""
        entry = parse_json(line, f"{self.path}, line {line_number}")
        fields = {"id": int, "event": str, "team": str, "name": str, "result": dict, "previous": str, "hash": str}
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), kind) for key, kind in fields.items()):
            raise FileFormatError(f"{self.path}, line {line_number}: this is not an entry of a leaderboard.")
        return entry

    def standings(self, event: str, limit: int = 100) -> list[dict[str, Any]]:
        """Return an event's entries, best first, as rows like those of a class's board."""
        rows = [_row(entry) for entry in self.entries() if entry["event"] == event]
        rows.sort(key=lambda row: -row["score"])
        for rank, row in enumerate(rows, 1):
            row |= {"rank": rank, "record": rank == 1}
        return rows[:limit]


def _row(entry: dict[str, Any]) -> dict[str, Any]:
    """Convert a stored entry to a row of the leaderboard."""
    result = entry["result"]
    if not all(isinstance(result.get(name), int | float) for name in ("score", *_GAINS)):
        raise FileFormatError(f"entry {entry['id']} of this leaderboard has no score.")
    row = {name: entry[name] for name in ("id", "team", "name")} | {"status": "scored", "score": result["score"]}
    return row | {name: result[name] for name in _GAINS}


def _hash(entry: dict[str, Any]) -> str:
    """Return the hash of an entry's canonical JSON, without the field of the hash itself."""
    content = json.loads(json.dumps({key: value for key, value in entry.items() if key != "hash"}, default=float))
    return hashlib.sha256(canonical(content)).hexdigest()
