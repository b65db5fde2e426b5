"""The check inside a notebook: verdicts under the cell, no error when something is unsolved, hints one by one."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path

from tilewise.learn.answering import UNREADABLE
from tilewise.learn.checking import Result, check, exercise_names, known
from tilewise.learn.solved import remember


def verdict_lines(results: list[Result]) -> list[str]:
    """A mark and the task of each exercise, what is wrong with it, and how many are solved."""
    unread = {result.feedback for result in results if result.feedback.startswith(UNREADABLE)}
    if unread and len(results) > 1:  # no exercise could be tried, so it is said once
        return [f"✗ {unread.pop()}", f"0 of {len(results)} solved"]
    found = []
    for result in results:
        found.append(f"{'✓' if result.solved else '✗'} {result.name}: {result.task}")
        found += [] if result.solved else [f"    {result.feedback}"]
    solved = sum(result.solved for result in results)
    return [*found, f"{solved} of {len(results)} solved" + ("" if solved < len(results) else "; well done")]


def report(lesson: str, file: str | Path | None = None, time_limit: float = 60.0) -> None:
    """Check the answers in LESSON.py beside the notebook, keep what is solved, and print the verdicts."""
    results = check(lesson, Path(file) if file is not None else Path(f"{known(lesson)}.py"), time_limit)
    unkept = remember(lesson, results)
    print("\n".join([*verdict_lines(results), *filter(None, [unkept])]))


def hints(lesson: str, exercise: str) -> list[str]:
    """The hints for one exercise, from a nudge to nearly the answer."""
    exercise_names(lesson, exercise)
    text = (files("tilewise.learn") / "hints.toml").read_text(encoding="utf-8")
    found: list[str] = tomllib.loads(text)[lesson][exercise]
    return found


def hint(lesson: str, exercise: str, number: int = 1) -> None:
    """Print one hint; `number=2` says more."""
    given = hints(lesson, exercise)
    at = min(max(number, 1), len(given))
    print(f"{exercise}, hint {at} of {len(given)}: {given[at - 1]}")
