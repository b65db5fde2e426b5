"""Checking a reader's answers: their file runs in a process of its own, and every wrong answer gets a sentence.

An exercise is a function in the reader's file and a check that calls it with many inputs. A check raises `Wrong` with
what was asked, what came back and what to look at; a crash, a missing function and an endless loop are reported in the
same way, so that one unfinished exercise never hides the verdict on the others.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from tilewise._files import write_whole
from tilewise.errors import ConfigurationError

LESSONS = ("profiling", "acceleration", "quantization", "pruning", "caching", "benchmarking", "costmodel")
_LARGEST_FILE = 1 << 20


class Wrong(Exception):
    """An answer that is not right; the message is the feedback."""


@dataclass(frozen=True)
class Exercise:
    """A function the reader writes, and the check of it."""

    name: str
    task: str
    check: Callable[[Callable[..., Any]], None]


@dataclass(frozen=True)
class Result:
    """The verdict on one exercise; `feedback` is empty when it is solved."""

    name: str
    task: str
    solved: bool
    feedback: str


def exercises(lesson: str) -> tuple[Exercise, ...]:
    """The exercises of a lesson, in order."""
    found: tuple[Exercise, ...] = import_module(f"tilewise.learn.exercises.{known(lesson)}").EXERCISES
    return found


def known(lesson: str) -> str:
    if lesson not in LESSONS:
        raise ConfigurationError(f"There is no lesson {lesson!r}; there are {', '.join(LESSONS)}.")
    return lesson


def start(lesson: str, path: Path) -> Path:
    """Write the unfinished exercises of a lesson to `path`; what is already there is never written over."""
    text = (files("tilewise.learn") / "start" / f"{known(lesson)}.py").read_text(encoding="utf-8")
    if path.exists():
        raise ConfigurationError(f"{path} is already there; check it, or give another --file.")
    write_whole(path, text)
    return path


def check(lesson: str, path: Path, time_limit: float = 60.0) -> list[Result]:
    """Judge a reader's file, in a process that is ended after `time_limit` seconds an exercise."""
    wanted = exercises(lesson)
    if not path.is_file():
        raise ConfigurationError(f"{path} is not there; `tilewise check {lesson} --start` writes it.")
    if path.stat().st_size > _LARGEST_FILE:
        raise ConfigurationError(f"{path} is larger than 1 MiB, which no answer needs to be.")
    return [_judge(lesson, exercise, path, time_limit) for exercise in wanted]


def _judge(lesson: str, exercise: Exercise, path: Path, time_limit: float) -> Result:
    command = [sys.executable, "-m", "tilewise.learn.worker", lesson, exercise.name, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=time_limit)
    except subprocess.TimeoutExpired:
        feedback = f"it did not come to an end within {time_limit:g} seconds; look for a loop that never stops"
        return Result(exercise.name, exercise.task, False, feedback)
    try:
        verdict = json.loads(done.stdout.splitlines()[-1])["feedback"]
    except (IndexError, ValueError, KeyError, TypeError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        verdict = f"the process ended before the check did ({last})"
    return Result(exercise.name, exercise.task, not verdict, str(verdict))
