"""The process in which a reader's file runs: `python -m tilewise.learn.worker LESSON EXERCISE FILE`.

The verdict is one line of JSON, the last on standard output; what the reader's code prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

from tilewise.learn.checking import Exercise, Wrong, exercises


def feedback(exercise: Exercise, path: str) -> str:
    """What is wrong with the answer, or nothing."""
    try:
        names = runpy.run_path(path)
    except SyntaxError as error:
        return f"Python cannot read the file: {error.msg} in line {error.lineno}"
    except Exception as error:
        return f"the file stops with {_sentence(error, path)}"
    function = names.get(exercise.name)
    if not callable(function):
        return f"the file has no function {exercise.name}; do not rename it"
    return _verdict(exercise, function, path)


def _verdict(exercise: Exercise, function: Any, path: str) -> str:
    try:
        exercise.check(function)
    except Wrong as wrong:
        return str(wrong)
    except NotImplementedError:
        return "not written yet"
    except Exception as error:
        if _in_the_readers_code(error, path) or "argument" in str(error):
            return f"it stops with {_sentence(error, path)}"
        return f"what it gives has not the form that its first lines ask for ({_sentence(error, path)})"
    return ""


def _in_the_readers_code(error: Exception, path: str) -> bool:
    return any(frame.filename == path for frame in traceback.extract_tb(error.__traceback__))


def _sentence(error: Exception, path: str) -> str:
    """The error, and the line of the reader's own file where it came up."""
    own = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}" + (f": {text}" if text else "") + (f" (line {own[-1]})" if own else "")


def main() -> None:
    lesson, name, path = sys.argv[1:]
    exercise = next(e for e in exercises(lesson) if e.name == name)
    sys.path.insert(0, str(Path(path).resolve().parent))
    with contextlib.redirect_stdout(sys.stderr):
        found = feedback(exercise, path)
    print(json.dumps({"feedback": found}))


if __name__ == "__main__":
    main()
