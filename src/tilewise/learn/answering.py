"""The process that runs a reader's file: `python -m tilewise.learn.answering FILE NAME`, connected by two pipes.

It loads the file and calls one of its functions for each request. Output of the reader's code goes to standard error.
The verdict is made in the process at the other end of the pipes, see `checking`.
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

from tilewise.learn.remote import Codec, MessageChannel

UNREADABLE = "Python cannot read the file"


class RequestRejected(Exception):
    """The checking process rejected a request for one of its objects."""


def load(path: str, name: str) -> tuple[Callable[..., Any] | None, str]:
    """Load the function `name` from a file; return it, or None and a sentence about what is wrong."""
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
    """Describe an exception in one sentence, with the line of file `path` that raised it."""
    own_lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    text = str(error).strip().split("\n")[0][:300]
    return f"{type(error).__name__}" + (f": {text}" if text else "") + (f" (line {own_lines[-1]})" if own_lines else "")


def serve(channel: MessageChannel, path: str, name: str) -> None:
    """Load function `name` from the reader's file; answer each request with its result and changed arguments."""
    channel.send({"ready": True})
    function, why = load(path, name)
    channel.send({"loaded": function is not None, "why": why})
    while function is not None:
        call = channel.receive()
        codec = Codec(_remote_request(channel))
        args = [codec.decode(value) for value in call["args"]]
        options = {key: codec.decode(value) for key, value in call["options"].items()}
        codec.views = [*args, *options.values()]
        try:
            result = function(*args, **options)
        except Exception as error:
            unwritten = isinstance(error, NotImplementedError)
            channel.send({"stops": sentence(error, path), "unwritten": unwritten})
            continue
        modified = {
            at: Codec().encode(_copy_array(value)) for at, value in enumerate(codec.views) if _is_mutable(value)
        }
        channel.send({"gives": codec.encode(result), "written": modified})


def _remote_request(channel: MessageChannel) -> Callable[[int, str, Sequence[Any]], Any]:
    """Return a function that calls a method of one of the checking process's objects and returns the result."""
    codec = Codec(lambda *_: None)

    def ask(number: int, name: str, args: Sequence[Any]) -> Any:
        """Call method `name` of the checking process's object `number`."""
        channel.send({"asks": [number, name, [codec.encode(value) for value in args]]})
        answer = channel.receive()
        if "refused" in answer:
            raise RequestRejected(str(answer["refused"]))
        return codec.decode(answer["told"])

    return ask


def _is_mutable(value: Any) -> bool:
    return isinstance(value, np.ndarray | list)


def _copy_array(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def main() -> None:
    """Load a reader's file in this child process and answer the parent's calls over the pipes."""
    path, name = sys.argv[1:3]
    channel = MessageChannel(os.dup(0), os.dup(1))
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # keep the reader's output out of the message channel
    sys.path.insert(0, str(Path(path).resolve().parent))
    serve(channel, path, name)


if __name__ == "__main__":
    main()
