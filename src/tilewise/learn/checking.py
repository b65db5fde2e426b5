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


TIME_LIMIT = 5.0  # seconds of computing an exercise may take; a right answer takes a fraction of one
_START_LIMIT = 60.0  # seconds until the process has imported NumPy, on a machine that is busy
_MAX_WAIT = 4  # times the limit, if other programs keep the answer's process from computing
Starter = Callable[[Path, str, float], AbstractContextManager[MessageChannel]]


@contextmanager
def answering(path: Path, name: str, deadline: float) -> Iterator[MessageChannel]:
    """Start a process that loads the file at `path` and calls its function `name`; kill it when the block ends."""
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
    """Return the CPU time of a process; None where /proc does not tell."""
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
    """Write the unfinished exercises of a lesson to `path`; never overwrite a file."""
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
            return _verdict(exercise, Answer(channel))
        except TimeoutError:
            return f"it did not come to an end within {time_limit:g} seconds; look for a loop that never stops"
        except ConnectionLost as error:
            return f"there is no answer: {error}"


def _verdict(exercise: Exercise, answer: Callable[..., Any]) -> str:
    """Run an exercise's check on an answer; return what is wrong in one sentence, "" if nothing."""
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
    """Check without a second process: in a browser, where an answer could only deceive its own author."""
    from tilewise.learn.answering import load, sentence

    function, why = load(path, exercise.name)

    def answer(*args: Any, **options: Any) -> Any:
        assert function is not None
        try:
            return function(*args, **options)
        except (Wrong, NotImplementedError):
            raise
        except Exception as error:
            raise AnswerFailed(_describe_failure(sentence(error, path), args)) from None

    return why if function is None else _verdict(exercise, answer)


def _describe_failure(failure: str, args: Sequence[Any]) -> str:
    """Add the arguments of the call to the sentence of an error: numbers as they are, arrays by their shapes."""
    shapes = [getattr(value, "shape", None) for value in args]
    words = [_short(value) if shape is None else f"{shape}" for value, shape in zip(args, shapes, strict=True)]
    return f"{failure} in the call with {', '.join(words)}"


class AnswerFailed(Exception):
    """The reader's function raised an error; the message is its sentence."""


class Answer:
    """The reader's function, called in its own process."""

    def __init__(self, channel: MessageChannel) -> None:
        self._channel = channel

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Send the arguments, serve requests for local objects, and return the decoded result."""
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
            _write(codec, message["written"])
            return codec.decode(message["gives"])
        except (ValueError, TypeError, IndexError, KeyError, ArithmeticError, MemoryError):
            raise ConnectionLost("it wrote something else than an answer") from None

    def _answer_request(self, codec: Codec, question: Any) -> Wrong | None:
        """Answer a request for an object of this process; return the error that it raised in the check, if any."""
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


def _write(codec: Codec, written: dict[str, Any]) -> None:
    """Copy the answer's changes to array and list arguments, encoded in `written`, into the originals."""
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


Mistakes = Sequence[tuple[Any, str]]  # what a known mistake would give, and the hint for it


def same_number(
    answer: Any, right: float, call: str, hint: str, tolerance: float = 1e-6, *, mistakes: Mistakes = ()
) -> None:
    """Require a number within a tolerance; `call` describes how the answer was called.

    An answer that equals the result of a known mistake gets the hint for that mistake.
    """
    require(isinstance(answer, int | float | np.number), f"{call} gave {_short(answer)}, which is not a number")
    if not np.isclose(float(answer), right, rtol=tolerance, atol=tolerance):
        candidates = [*mistakes, *_unit_mistakes(right)]
        hint = next(
            (text for value, text in candidates if np.isclose(float(answer), value, rtol=tolerance, atol=0)), hint
        )
        raise Wrong(f"{call} gave {float(answer):.6g}, and {right:.6g} is right: {hint}")


def _unit_mistakes(right: float) -> Mistakes:
    """List what a wrong sign, a reciprocal or another unit would make of a number."""
    if right == 0:
        return ()
    factors = [factor for exponent in (2, 3, 6, 9) for factor in (10.0**exponent, 10.0**-exponent)]
    units = [(right * factor, f"it is {factor:g} times the right value: look at the units") for factor in factors]
    return [
        (-right, "the sign is the wrong way round"),
        (1 / right, "it is the reciprocal: divide the other way"),
        *units,
    ]


def same_array(
    answer: Any, right: Any, call: str, hint: str, tolerance: float = 1e-5, *, mistakes: Mistakes = ()
) -> None:
    """Require an array of the same shape with close values; `call` describes how the answer was called.

    An answer that equals the result of a known mistake gets the hint for that mistake.
    """
    require(isinstance(answer, np.ndarray), f"{call} gave {_short(answer)}, which is not an array")
    expected = np.asarray(right)
    for value, text in mistakes:
        same_mistake = answer.shape == np.shape(value) and np.allclose(answer, value, rtol=tolerance, atol=tolerance)
        if same_mistake and not np.allclose(value, right, rtol=tolerance, atol=tolerance):
            hint = text
            break
    else:
        hint = _arrangement(answer, expected, tolerance) or hint
    require(
        answer.shape == expected.shape, f"{call} gave the shape {answer.shape}, and {expected.shape} is right: {hint}"
    )
    if not np.allclose(answer, expected, rtol=tolerance, atol=tolerance):
        index = tuple(int(i) for i in np.unravel_index(int(np.abs(answer - expected).argmax()), expected.shape))
        raise Wrong(f"{call} gave {answer[index]} at {index}, and {expected[index]} is right: {hint}")


def _arrangement(answer: np.ndarray[Any, Any], right: np.ndarray[Any, Any], tolerance: float) -> str:
    """Say how an answer has the right numbers otherwise arranged (transposed, ...) or without fractions; else ""."""

    def close(values: np.ndarray[Any, Any], others: np.ndarray[Any, Any]) -> bool:
        return values.shape == others.shape and np.allclose(values, others, rtol=tolerance, atol=tolerance)

    if close(answer, right):
        return ""
    if close(answer.T, right):
        return "it is transposed"
    if close(answer.ravel(), right.ravel()):
        return "the numbers are right: reshape them"
    if close(np.sort(answer, axis=None), np.sort(right, axis=None)):
        return "these are the right numbers in the wrong order or place"
    if np.issubdtype(answer.dtype, np.integer) and not np.array_equal(right, np.rint(right)):
        return f"its dtype is {answer.dtype}, which has no fractions"
    return ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
