"""Progress of a reader, stored in tilewise's cache folder: when each exercise was first solved."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from tilewise._files import read_json_input, write_atomic
from tilewise._system import cache_folder
from tilewise.errors import TilewiseError, UnavailableError
from tilewise.learn.checking import LESSONS, Result, exercises

Progress = dict[str, dict[str, str]]  # lesson: exercise: when it was solved


def where() -> Path:
    return cache_folder() / "learn" / "progress.json"


def progress() -> Progress:
    """Return the solved exercises; a damaged file counts as empty."""
    try:
        solved = read_json_input(where())
        return {lesson: {str(k): str(v) for k, v in solved.get(lesson, {}).items()} for lesson in LESSONS}
    except (TilewiseError, ValueError, AttributeError):
        return {lesson: {} for lesson in LESSONS}


def remember(lesson: str, results: Iterable[Result]) -> str:
    """Store newly solved exercises; return "" or a sentence about why they cannot be stored."""
    solved = progress()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    for result in results:
        if result.solved:
            solved[lesson].setdefault(result.name, now)
    try:
        write_atomic(where(), json.dumps(solved, indent=1) + "\n")
    except UnavailableError as error:
        return f"Your progress is not stored: {error}"
    return ""


def lines() -> list[str]:
    """Format one line per lesson, with a mark for each exercise."""
    solved = progress()
    rows = []
    for lesson in LESSONS:
        names = [exercise.name for exercise in exercises(lesson)]
        marks = "  ".join(f"{'✓' if name in solved[lesson] else '·'} {name}" for name in names)
        rows.append(f"{lesson:14s} {sum(name in solved[lesson] for name in names)}/{len(names)}  {marks}")
    return rows
