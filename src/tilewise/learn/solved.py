"""What a reader has solved so far, kept between runs in tilewise's cache folder: when each exercise first passed."""

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
    """What is solved; a file that was damaged counts as nothing."""
    try:
        kept = read_json_input(where())
        return {lesson: {str(k): str(v) for k, v in kept.get(lesson, {}).items()} for lesson in LESSONS}
    except (TilewiseError, ValueError, AttributeError):
        return {lesson: {} for lesson in LESSONS}


def remember(lesson: str, results: Iterable[Result]) -> str:
    """Add what was solved just now; what was solved once stays solved. Gives a sentence where it cannot be kept."""
    kept = progress()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    for result in results:
        if result.solved:
            kept[lesson].setdefault(result.name, now)
    try:
        write_atomic(where(), json.dumps(kept, indent=1) + "\n")
    except UnavailableError as error:
        return f"Your progress is not kept: {error}"
    return ""


def lines() -> list[str]:
    """One line a lesson, with a mark for each exercise."""
    kept = progress()
    found = []
    for lesson in LESSONS:
        names = [exercise.name for exercise in exercises(lesson)]
        marks = "  ".join(f"{'✓' if name in kept[lesson] else '·'} {name}" for name in names)
        found.append(f"{lesson:14s} {sum(name in kept[lesson] for name in names)}/{len(names)}  {marks}")
    return found
