"""The plugin's process: limits first, then the plugin, then one answer per question until the pipe closes.

Run inside the jail as ``python -m tilewise_arena.sandbox.process ROLE EVENT USER``; see `jail`, which builds it, and
`plugins`, which trusts nothing it says. Questions and answers are bare numbers of agreed shape, so that there is as
little as possible between the pipe and the plugin, for the baseline and for entries alike.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tilewise
from tilewise.bench.events import TinyMLPerf
from tilewise_arena.sandbox import baseline, wire

MEMORY_BYTES = 4 << 30
CPU_SECONDS = 600
OPEN_FILES = 64
FILE_BYTES = 16 << 20  # of one file; what it says on standard error is one
PROCESSES = 64  # threads, in fact: the jail knows no other processes
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2


def limit_resources() -> None:
    """Time, memory, open files and threads: set for this process, and not to be raised again."""
    limits = {
        resource.RLIMIT_CPU: CPU_SECONDS,
        resource.RLIMIT_AS: MEMORY_BYTES,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_NPROC: PROCESSES,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    for name, value in limits.items():
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(name, (value, value))


def become_nobody(user: int) -> None:
    """Leave root behind: another user, no groups, and so no capabilities."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def leave_a_twin() -> None:
    """Fork a process that does nothing but share what is in memory so far.

    Pages that the plugin changes or adds are its own from then on, and the kernel counts them so: what was there before
    can neither be given back for credit nor be filled with something else unseen.
    """
    gc.collect()
    gc.freeze()  # looking for cycles would write to every object, and so to every page
    if os.fork() == 0:
        os.closerange(0, OPEN_FILES)
        while True:
            signal.pause()


def take_rules(program: bytes) -> None:
    """Give up every system call that the compiled list does not name, for good."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.create_string_buffer(header, len(header)), 0, 0):
        raise OSError(ctypes.get_errno(), "the list of system calls was not taken")


def load_plugin(role: str, event: str) -> Callable[[Any], Any]:
    """The plugin's `load(event, folder)`, called: a function from inputs to answers."""
    folder = Path("/plugin")
    if role == "baseline":
        return baseline.load(event, folder)
    if role == "empty":  # the pipe itself: what no answer can be faster than
        nothing = np.zeros(*wire.answer_of(TinyMLPerf.event(event)))
        return lambda _: nothing
    spec = importlib.util.spec_from_file_location("plugin", folder / "plugin.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    answer: Callable[[Any], Any] = module.load(event, folder)
    return answer


def serve(answer: Callable[[Any], Any], event: str, questions: int, answers: int) -> None:
    """Answer until nobody asks.

    There is nothing here that a plugin which spoke on the pipe itself could leave out.
    """
    known = TinyMLPerf.event(event)
    (shape, dtype), (wanted, kind) = wire.question_of(known), wire.answer_of(known)
    question = np.empty(shape, dtype)
    whole = question.data.cast("B")
    while True:
        count = os.readv(questions, [whole])
        while count < len(whole):
            more = os.readv(questions, [whole[count:]])
            if not more:
                return
            count += more
        given = np.ascontiguousarray(answer(question), kind)
        if given.shape != wanted:
            raise ValueError(f"an answer has the shape {given.shape}, and {wanted} is asked for")
        if os.write(answers, given.data) != given.nbytes:
            raise OSError("an answer did not fit the pipe")


def main() -> None:
    role, event, user = sys.argv[1:4]
    tilewise.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    questions, answers = os.dup(0), os.dup(1)
    with Path(os.devnull).open("r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)  # what the plugin prints is not an answer
    TinyMLPerf.event(event)
    become_nobody(int(user))
    limit_resources()
    leave_a_twin()
    wire.send(answers, b"r")  # the plugin's memory is counted from here on
    (length,) = struct.unpack("<I", wire.receive(questions, 4))
    take_rules(wire.receive(questions, length))
    answer = load_plugin(role, event)
    wire.send(answers, b"l")
    with contextlib.suppress(wire.Ended):
        serve(answer, event, questions, answers)


if __name__ == "__main__":
    main()
