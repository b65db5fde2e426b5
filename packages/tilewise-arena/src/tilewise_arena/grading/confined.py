"""The first process in the jail of an answer: limits and the list of system calls, then `tilewise.learn.answering`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tilewise.learn.answering import serve
from tilewise.learn.remote import Line
from tilewise_arena.sandbox.process import become_nobody, limit_resources, take_rules


def main() -> None:
    name, user = sys.argv[1:3]
    line = Line(os.dup(0), os.dup(1))
    with Path(os.devnull).open("r+b") as nothing:
        for descriptor in (0, 1):
            os.dup2(nothing.fileno(), descriptor)
    become_nobody(int(user))
    limit_resources()
    take_rules(bytes.fromhex(line.receive()["rules"]))
    serve(line, "/plugin/answers.py", name)


if __name__ == "__main__":
    main()
