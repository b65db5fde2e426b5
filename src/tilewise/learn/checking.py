"""Checking a reader's answers: their file runs in a process of its own, and every wrong answer gets a sentence.

An exercise is a function in the reader's file and a check that calls it with many inputs. A check raises `Wrong` with
what was asked, what came back and what to look at; a crash, a missing function and an endless loop are reported in the
same way, so that one unfinished exercise never hides the verdict on the others. The check itself runs here, where the
reader's code never does: nothing in an answer can write its own verdict.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from tilewise._files import read_input, write_atomic
from tilewise.errors import ConfigurationError, did_you_mean
from tilewise.learn.remote import Codec, Gone, Line, asked

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


Starter = Callable[[Path, str, float], AbstractContextManager[Line]]


@contextmanager
def answering(path: Path, name: str, deadline: float) -> Iterator[Line]:
    """A process that has loaded the file at `path` and calls its function `name`; ended with the block."""
    command = [sys.executable, "-m", "tilewise.learn.answering", str(path), name]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield Line(process.stdout.fileno(), process.stdin.fileno(), deadline)
    finally:
        process.kill()
        process.communicate()


def exercises(lesson: str) -> tuple[Exercise, ...]:
    """The exercises of a lesson, in order."""
    found: tuple[Exercise, ...] = import_module(f"tilewise.learn.exercises.{known(lesson)}").EXERCISES
    return found


def known(lesson: str) -> str:
    if lesson not in LESSONS:
        raise ConfigurationError(f"There is no lesson {lesson!r}; {did_you_mean(lesson, LESSONS)}")
    return lesson


def start(lesson: str, path: Path) -> Path:
    """Write the unfinished exercises of a lesson to `path`; what is already there is never written over."""
    text = (files("tilewise.learn") / "start" / f"{known(lesson)}.py").read_text(encoding="utf-8")
    if path.exists():
        raise ConfigurationError(f"{path} is already there; check it, or give another --file.")
    write_atomic(path, text)
    return path


def exercise_names(lesson: str, only: str | None = None) -> list[str]:
    """The names of a lesson's exercises, or the one that is asked for."""
    names = [exercise.name for exercise in exercises(lesson)]
    if only is not None and only not in names:
        raise ConfigurationError(f"The lesson {lesson} has no exercise {only!r}; {did_you_mean(only, names)}")
    return names if only is None else [only]


def check(
    lesson: str,
    path: Path,
    time_limit: float = 60.0,
    start_answering: Starter = answering,
    only: str | None = None,
) -> list[Result]:
    """Judge a reader's file, or one exercise in it; its process is ended after `time_limit` seconds an exercise."""
    names = exercise_names(lesson, only)
    wanted = [exercise for exercise in exercises(lesson) if exercise.name in names]
    read_input(path, _LARGEST_FILE)  # a file, and no larger than an answer needs to be
    return [
        Result(e.name, e.task, not said, said)
        for e in wanted
        for said in [feedback(e, path, time_limit, start_answering)]
    ]


def feedback(
    exercise: Exercise, path: str | Path, time_limit: float = 60.0, start_answering: Starter = answering
) -> str:
    """What is wrong with the answer, or nothing."""
    if sys.platform == "emscripten":  # a page in a browser has no other processes
        return _beside(exercise, str(path))
    with start_answering(Path(path), exercise.name, time.monotonic() + time_limit) as line:
        try:
            loaded = line.receive()
            if loaded.get("loaded") is not True:
                return str(loaded.get("why"))[:500]
            return _verdict(exercise, Answer(line))
        except TimeoutError:
            return f"it did not come to an end within {time_limit:g} seconds; look for a loop that never stops"
        except Gone as gone:
            return f"there is no answer: {gone}"


def _verdict(exercise: Exercise, answer: Callable[..., Any]) -> str:
    try:
        exercise.check(answer)
    except Wrong as wrong:
        return str(wrong)
    except NotImplementedError:
        return "not written yet"
    except Stopped as stopped:
        return f"it stops with {stopped}"
    except (Gone, TimeoutError):
        raise
    except Exception as error:
        text = str(error).strip().split("\n")[0][:300]
        said = f"{type(error).__name__}: {text}" if text else type(error).__name__
        return f"what it gives has not the form that its first lines ask for ({said})"
    return ""


def _beside(exercise: Exercise, path: str) -> str:
    """The same in this process: for a reader's own page, where nobody but the reader could be fooled."""
    from tilewise.learn.answering import load, sentence

    function, why = load(path, exercise.name)

    def answer(*args: Any, **options: Any) -> Any:
        assert function is not None
        try:
            return function(*args, **options)
        except (Wrong, NotImplementedError):
            raise
        except Exception as error:
            raise Stopped(sentence(error, path)) from None

    return why if function is None else _verdict(exercise, answer)


class Stopped(Exception):
    """The reader's function raised an error; the message is its sentence."""


class Answer:
    """The reader's function, called in its own process."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def __call__(self, *args: Any, **options: Any) -> Any:
        codec = Codec()
        told = [codec.encode(value) for value in args]
        self._line.send({"args": told, "options": {key: codec.encode(value) for key, value in options.items()}})
        codec.views = [*args, *options.values()]
        message, wrong = self._line.receive(), None
        while "asks" in message:
            wrong = self._tell(codec, message["asks"]) or wrong
            message = self._line.receive()
        if "stops" in message:
            if wrong is not None:
                raise wrong
            raise NotImplementedError if message.get("unwritten") is True else Stopped(str(message["stops"])[:400])
        try:
            _write(codec, message["written"])
            return codec.decode(message["gives"])
        except (ValueError, TypeError, IndexError, KeyError, ArithmeticError, MemoryError):
            raise Gone("it wrote something else than an answer") from None

    def _tell(self, codec: Codec, question: Any) -> Wrong | None:
        """Answer what is asked of something that stayed here; gives the objection, if there is one."""
        try:
            number, name, args = question
            found = asked(codec.kept, number, name, [codec.decode(value) for value in args])
        except Wrong as wrong:
            self._line.send({"refused": str(wrong)})
            return wrong
        except Exception as error:
            self._line.send({"refused": f"{type(error).__name__}: {error}"[:300]})
            return None
        self._line.send({"told": codec.encode(found)})
        return None


def _write(codec: Codec, written: dict[str, Any]) -> None:
    """Arrays and lists that the answer was given become what it made of them."""
    for at, told in written.items():
        mine, theirs = codec.views[int(at)], codec.decode(told)
        if isinstance(mine, list) and isinstance(theirs, list):
            mine[:] = theirs
        elif isinstance(mine, np.ndarray) and np.shape(theirs) == mine.shape:
            np.copyto(mine, theirs, casting="unsafe")
