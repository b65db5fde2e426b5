"""Checks of a reader's answers: the file runs in a separate process, and every wrong answer gets a sentence.

An exercise is a function in the reader's file and a check that calls it with many inputs. A check raises `Wrong` with
the call, the result and a hint. A crash, a missing function and an endless loop are reported in the same way, so that
one unfinished exercise never hides the verdict on the others. The check runs in this process, which never runs the
reader's code: an answer cannot write its own verdict.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from tilewise._atomic import write_atomic
from tilewise._files import read_input
from tilewise.errors import ConfigurationError, did_you_mean
from tilewise.learn.remote import Codec, ConnectionLost, MessageChannel, handle_request

LESSONS = ("profiling", "acceleration", "quantization", "pruning", "caching", "benchmarking", "costmodel")
_MAX_ANSWER_BYTES = 1 << 20  # arbitrary; rejects files that are not an answer


class Wrong(Exception):
    """Raised for a wrong answer; the message is the feedback to the reader."""


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


TIME_LIMIT = 5.0  # seconds of computing an exercise may take; a right answer takes a fraction of one
_START_LIMIT = 60.0  # seconds until the process has imported NumPy, on a machine that is busy
_MAX_WAIT = 4  # times the limit, if other programs keep the answer's process from computing
Starter = Callable[[Path, str, float], AbstractContextManager[MessageChannel]]


@contextmanager
def answering(path: Path, name: str, deadline: float) -> Iterator[MessageChannel]:
    """Start a process that calls function `name` of the file at `path`.

    Yields the channel to it and kills it at the end.
    """
    command = [sys.executable, "-m", "tilewise.learn.answering", str(path), name]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0)
    assert process.stdin is not None and process.stdout is not None
    try:
        channel = MessageChannel(process.stdout.fileno(), process.stdin.fileno(), deadline)
        channel.computing_seconds = lambda: _cpu_seconds(process.pid)
        yield channel
    finally:
        process.kill()
        process.communicate()


def _cpu_seconds(pid: int) -> float | None:
    """Return the CPU time of a process in seconds; None without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def exercises(lesson: str) -> tuple[Exercise, ...]:
    """Return the exercises of a lesson, in order."""
    result: tuple[Exercise, ...] = import_module(f"tilewise.learn.exercises.{check_lesson(lesson)}").EXERCISES
    return result


def check_lesson(lesson: str) -> str:
    """Return the lesson's name, or raise an error if it does not exist."""
    if lesson not in LESSONS:
        raise ConfigurationError(f"There is no lesson {lesson!r}; {did_you_mean(lesson, LESSONS)}")
    return lesson


def start(lesson: str, path: Path) -> Path:
    """Write the unfinished exercises of a lesson to `path`; an existing file is not overwritten."""
    text = (files("tilewise.learn") / "start" / f"{check_lesson(lesson)}.py").read_text(encoding="utf-8")
    if path.exists():
        raise ConfigurationError(f"{path} is already there; check it, or give another --file.")
    write_atomic(path, text)
    return path


def exercise_names(lesson: str, only: str | None = None) -> list[str]:
    """Return the names of a lesson's exercises, or `only` if the lesson has it."""
    names = [exercise.name for exercise in exercises(lesson)]
    if only is not None and only not in names:
        raise ConfigurationError(f"The lesson {lesson} has no exercise {only!r}; {did_you_mean(only, names)}")
    return names if only is None else [only]


def check(
    lesson: str,
    path: Path,
    time_limit: float = TIME_LIMIT,
    start_answering: Starter = answering,
    only: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """Check a reader's file, or one exercise in it; each exercise may compute for `time_limit` seconds.

    `progress` receives the name of each exercise before it is checked.
    """
    names = exercise_names(lesson, only)
    selected = [exercise for exercise in exercises(lesson) if exercise.name in names]
    read_input(path, _MAX_ANSWER_BYTES)  # rejects folders and files that are too large
    results = []
    for exercise in selected:
        progress(exercise.name)
        message = feedback(exercise, path, time_limit, start_answering)
        results.append(Result(exercise.name, exercise.task, not message, message))
    return results


def feedback(
    exercise: Exercise, path: str | Path, time_limit: float = TIME_LIMIT, start_answering: Starter = answering
) -> str:
    """Return a sentence about what is wrong with the answer, or "" if it is right."""
    if sys.platform == "emscripten":  # a page in a browser has no other processes
        return _check_in_process(exercise, str(path))
    # The process imports NumPy before the clock of the answer starts; a sandbox ends it when all limits are over.
    last = time.monotonic() + _START_LIMIT + _MAX_WAIT * time_limit
    with start_answering(Path(path), exercise.name, last) as channel:
        try:
            channel.receive()  # the process is ready
            channel.limit(time_limit, _MAX_WAIT * time_limit)
            loaded = channel.receive()
            if loaded.get("loaded") is not True:
                return str(loaded.get("why"))[:500]
            return _feedback_on(exercise, Answer(channel))
        except TimeoutError:
            limit = f"{time_limit:g} seconds of computing"
            return f"it did not come to an end within {limit}; look for a loop that never stops, or does far too much"
        except ConnectionLost as error:
            return f"there is no answer: {error}"


def _feedback_on(exercise: Exercise, answer: Callable[..., Any]) -> str:
    """Check an answer; return the feedback on any failure as a sentence, "" if it is right."""
    try:
        exercise.check(answer)
    except Wrong as wrong:
        return str(wrong)
    except NotImplementedError:
        return "not written yet"
    except AnswerFailed as failure:
        return f"it stops with {failure}"
    except (ConnectionLost, TimeoutError):
        raise
    except Exception as error:
        text = str(error).strip().split("\n")[0][:300]
        message = f"{type(error).__name__}: {text}" if text else type(error).__name__
        return f"what it gives has not the form that its first lines ask for ({message})"
    return ""


def _check_in_process(exercise: Exercise, path: str) -> str:
    """Check an answer in this process, as in a browser, where deceiving the check harms nobody."""
    from tilewise.learn.answering import load, sentence

    function, why = load(path, exercise.name)

    def answer(*args: Any, **options: Any) -> Any:
        """Call the reader's function; convert its exceptions to feedback."""
        assert function is not None
        try:
            return function(*args, **options)
        except (Wrong, NotImplementedError):
            raise
        except Exception as error:
            raise AnswerFailed(_describe_failure(sentence(error, path), args)) from None

    return why if function is None else _feedback_on(exercise, answer)


def _describe_failure(failure: str, args: Sequence[Any]) -> str:
    """Append a call's arguments to an error's sentence: numbers as they are, arrays by shape."""
    shapes = [getattr(value, "shape", None) for value in args]
    words = [short(value) if shape is None else f"{shape}" for value, shape in zip(args, shapes, strict=True)]
    return f"{failure} in the call with {', '.join(words)}"


class AnswerFailed(Exception):
    """The reader's function raised an error; the message is its sentence."""


class Answer:
    """The reader's function as a callable, which runs in another process."""

    def __init__(self, channel: MessageChannel) -> None:
        self._channel = channel

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the reader's function in its process, serving its requests for local objects; return the result."""
        codec = Codec()
        encoded = [codec.encode(value) for value in args]
        self._channel.send({"args": encoded, "options": {key: codec.encode(value) for key, value in options.items()}})
        codec.views = [*args, *options.values()]
        message, wrong = self._channel.receive(), None
        while "asks" in message:
            wrong = self._answer_request(codec, message["asks"]) or wrong
            message = self._channel.receive()
        if "stops" in message:
            if wrong is not None:
                raise wrong
            if message.get("unwritten") is True:
                raise NotImplementedError
            raise AnswerFailed(_describe_failure(str(message["stops"])[:400], args))
        try:
            _copy_back(codec, message["written"])
            return codec.decode(message["gives"])
        except (ValueError, TypeError, IndexError, KeyError, ArithmeticError, MemoryError):
            raise ConnectionLost("it wrote something other than an answer") from None

    def _answer_request(self, codec: Codec, question: Any) -> Wrong | None:
        """Serve a request for a local object; return the `Wrong` that this raised, if any."""
        try:
            number, name, args = question
            answer_value = handle_request(codec.local_objects, number, name, [codec.decode(value) for value in args])
        except Wrong as wrong:
            self._channel.send({"refused": str(wrong)})
            return wrong
        except Exception as error:
            self._channel.send({"refused": f"{type(error).__name__}: {error}"[:300]})
            return None
        self._channel.send({"told": codec.encode(answer_value)})
        return None


def _copy_back(codec: Codec, written: dict[str, Any]) -> None:
    """Copy changed contents of array and list arguments back into the originals."""
    for at, encoded in written.items():
        mine, theirs = codec.views[int(at)], codec.decode(encoded)
        if isinstance(mine, list) and isinstance(theirs, list):
            mine[:] = theirs
        elif isinstance(mine, np.ndarray) and np.shape(theirs) == mine.shape:
            np.copyto(mine, theirs, casting="unsafe")


# --- comparison of answers ---


def require(holds: bool, feedback: str) -> None:
    if not holds:
        raise Wrong(feedback)


def short(value: Any) -> str:
    """Format a value briefly for a sentence: an array as its shape, others as the start of their repr."""
    if isinstance(value, np.ndarray) and value.size > 4:
        return f"an array of shape {value.shape}"
    text = repr(value.tolist() if isinstance(value, np.ndarray) else value)
    return text if len(text) < 60 else text[:57] + "..."
