"""The process of an answer in its sandbox: sets limits and the seccomp filter, and runs `tilewise.learn.answering`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tilewise.learn.answering import serve
from tilewise.learn.remote import MessageChannel
from tilewise_arena.sandbox.process import drop_root, install_seccomp_filter, limit_resources


def main() -> None:
    """Limit this process's resources, then answer the checker's calls of a student's functions."""
    name, user = sys.argv[1:3]
    channel = MessageChannel(os.dup(0), os.dup(1))
    with Path(os.devnull).open("r+b") as nothing:
        for descriptor in (0, 1):
            os.dup2(nothing.fileno(), descriptor)
    drop_root(int(user))
    limit_resources()
    install_seccomp_filter(bytes.fromhex(channel.receive()["rules"]))
    serve(channel, "/plugin/answers.py", name)


if __name__ == "__main__":
    main()
