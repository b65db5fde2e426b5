"""Checks inside a notebook: print verdicts and hints without raising errors."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

from tilewise._atomic import write_atomic
from tilewise._files import read_json_input
from tilewise._system import cache_folder
from tilewise.errors import TilewiseError, UnavailableError
from tilewise.learn.answering import UNREADABLE
from tilewise.learn.checking import LESSONS, TIME_LIMIT, Result, check, check_lesson, exercise_names, exercises

_CAUSES = ("the file stops with", "it stops with NameError", "the file leaves Python")  # one cause, all exercises


def verdict_lines(results: list[Result]) -> list[str]:
    """Format the verdicts: a mark and the task of each exercise, feedback, and the number solved."""
    syntax_errors = {result.feedback for result in results if result.feedback.startswith(UNREADABLE)}
    if syntax_errors and len(results) > 1:  # no exercise could run, so the error is reported once
        return [f"✗ {syntax_errors.pop()}", f"0 of {len(results)} solved"]
    lines: list[str] = []
    first_with: dict[str, str] = {}  # feedback without line and call: the first exercise that got it
    for result in results:
        lines.append(f"{'✓' if result.solved else '✗'} {result.name}: {result.task}")
        if result.solved:
            continue
        cause = re.sub(r"( \(line \d+\)| in the call with).*", "", result.feedback)
        repeated = cause in first_with and cause.startswith(_CAUSES)
        lines.append(f"    as {first_with[cause]} above" if repeated else f"    {result.feedback}")
        first_with.setdefault(cause, result.name)
    solved = sum(result.solved for result in results)
    return [*lines, f"{solved} of {len(results)} solved" + ("" if solved < len(results) else "; well done")]


def report(lesson: str, file: str | Path | None = None, time_limit: float = TIME_LIMIT) -> None:
    """Check the answers in LESSON.py next to the notebook, store progress, and print feedback."""
    results = check(lesson, Path(file) if file is not None else Path(f"{check_lesson(lesson)}.py"), time_limit)
    storage_error = remember(lesson, results)
    print("\n".join([*verdict_lines(results), *filter(None, [storage_error])]))


def hints(lesson: str, exercise: str) -> list[str]:
    """Return the hints for one exercise, from general to almost the answer."""
    exercise_names(lesson, exercise)
    text = (files("tilewise.learn") / "hints.toml").read_text(encoding="utf-8")
    texts: list[str] = tomllib.loads(text)[lesson][exercise]
    return texts


def hint(lesson: str, exercise: str, number: int = 1) -> None:
    """Print hint `number` for an exercise; higher numbers reveal more."""
    texts = hints(lesson, exercise)
    at = min(max(number, 1), len(texts))
    print(f"{exercise}, hint {at} of {len(texts)}: {texts[at - 1]}")


# --- progress ---


Progress = dict[str, dict[str, str]]  # lesson: exercise: when it was solved


def where() -> Path:
    return cache_folder() / "learn" / "progress.json"


def progress() -> Progress:
    """Return the solved exercises by lesson; a damaged file counts as empty."""
    try:
        solved = read_json_input(where())
        return {lesson: {str(k): str(v) for k, v in solved.get(lesson, {}).items()} for lesson in LESSONS}
    except (TilewiseError, ValueError, AttributeError):
        return {lesson: {} for lesson in LESSONS}


def remember(lesson: str, results: Iterable[Result]) -> str:
    """Store newly solved exercises; return "" or the reason why they cannot be stored."""
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
    """Format the progress as lines, one per lesson, with a mark for each exercise."""
    solved = progress()
    rows = []
    for lesson in LESSONS:
        names = [exercise.name for exercise in exercises(lesson)]
        marks = "  ".join(f"{'✓' if name in solved[lesson] else '·'} {name}" for name in names)
        rows.append(f"{lesson:14s} {sum(name in solved[lesson] for name in names)}/{len(names)}  {marks}")
    return rows
