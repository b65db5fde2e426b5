"""The process in which a reader's file runs: `python -m tilewise.learn.answering FILE NAME`, with pipes for both ways.

It loads the file and calls one function of it as often as it is asked to. What the reader's code prints goes to
standard error. Nothing here decides anything: the check stands on the other side of the pipe, see `checking`.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.learn.remote import Codec, Line

UNREADABLE = "Python cannot read the file"


class Refused(Exception):
    """What was asked of the other side's object is not allowed."""


def load(path: str, name: str) -> tuple[Callable[..., Any] | None, str]:
    """The function, or a sentence about why there is none."""
    try:
        names = runpy.run_path(path)
    except SyntaxError as error:
        return None, f"{UNREADABLE}: {error.msg}" + (f" in line {error.lineno}" if error.lineno else "")
    except SystemExit:
        return None, "the file leaves Python (sys.exit or the like) before the check can begin; take that out"
    except Exception as error:
        return None, f"the file stops with {sentence(error, path)}"
    function = names.get(name)
    return (function, "") if callable(function) else (None, f"the file has no function {name}; do not rename it")


def sentence(error: BaseException, path: str) -> str:
    """The error, and the line of the reader's own file where it came up."""
    own = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    text = str(error).strip().split("\n")[0][:300]
    return f"{type(error).__name__}" + (f": {text}" if text else "") + (f" (line {own[-1]})" if own else "")


def serve(line: Line, path: str, name: str) -> None:
    function, why = load(path, name)
    line.send({"loaded": function is not None, "why": why})
    while function is not None:
        call = line.receive()
        codec = Codec(_asking(line))
        args = [codec.decode(value) for value in call["args"]]
        options = {key: codec.decode(value) for key, value in call["options"].items()}
        codec.views = [*args, *options.values()]
        try:
            given = function(*args, **options)
        except Exception as error:
            unwritten = isinstance(error, NotImplementedError)
            line.send({"stops": sentence(error, path), "unwritten": unwritten})
            continue
        written = {at: Codec().encode(_whole(value)) for at, value in enumerate(codec.views) if _is_written_to(value)}
        line.send({"gives": codec.encode(given), "written": written})


def _asking(line: Line) -> Callable[[int, str, Sequence[Any]], Any]:
    codec = Codec(lambda *_: None)

    def ask(number: int, name: str, args: Sequence[Any]) -> Any:
        line.send({"asks": [number, name, [codec.encode(value) for value in args]]})
        answer = line.receive()
        if "refused" in answer:
            raise Refused(str(answer["refused"]))
        return codec.decode(answer["told"])

    return ask


def _is_written_to(value: Any) -> bool:
    return isinstance(value, np.ndarray | list)


def _whole(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def main() -> None:
    path, name = sys.argv[1:3]
    line = Line(os.dup(0), os.dup(1))
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # what the reader's code prints is not an answer
    sys.path.insert(0, str(Path(path).resolve().parent))
    serve(line, path, name)


if __name__ == "__main__":
    main()
