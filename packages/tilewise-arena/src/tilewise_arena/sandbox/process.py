"""The process of a plugin: it sets its limits, loads the plugin, and answers questions until the pipe closes.

It runs inside the sandbox (see `bubblewrap`) as ``python -m tilewise_arena.sandbox.process ROLE EVENT USER``. `host`
trusts nothing that it reports. Questions and answers are raw arrays of fixed shapes, so that there is little overhead
between the pipe and the plugin, for the baseline and for entries.
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
FILE_BYTES = 16 << 20  # per file, standard error included; arbitrary
PROCESSES = 64  # threads, because the sandbox has no other processes; arbitrary
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2


def limit_resources() -> None:
    """Set this process's limits on time, memory, open files and threads, which it cannot raise again."""
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


def drop_root(user: int) -> None:
    """Change from root to another user without groups and capabilities."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def fork_memory_reference() -> None:
    """Fork a sleeping process that shares all memory pages with this one.

    The kernel then counts the pages that the plugin changes or adds as private to it. The plugin can neither free
    earlier memory to lower its count, nor reuse that memory uncounted.
    """
    gc.collect()
    gc.freeze()  # a collection would write to every object, and so to every page
    if os.fork() == 0:
        os.closerange(0, OPEN_FILES)
        while True:
            signal.pause()


def install_seccomp_filter(program: bytes) -> None:
    """Install a compiled seccomp filter; all system calls that it does not allow fail from then on."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.create_string_buffer(header, len(header)), 0, 0):
        raise OSError(ctypes.get_errno(), "the seccomp filter could not be installed")


def load_plugin(role: str, event: str) -> Callable[[Any], Any]:
    """Load a plugin (or the baseline, or an empty one) and return its function from inputs to answers."""
    folder = Path("/plugin")
    if role == "baseline":
        return baseline.load(event, folder)
    if role == "empty":  # measures the pipe, which no plugin can be faster than
        nothing = np.zeros(*wire.answer_of(TinyMLPerf.event(event)))
        return lambda _: nothing
    spec = importlib.util.spec_from_file_location("plugin", folder / "plugin.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    answer: Callable[[Any], Any] = module.load(event, folder)
    return answer


def serve(answer: Callable[[Any], Any], event: str, questions: int, answers: int) -> None:
    """Answer questions over the pipes until they close; `questions` and `answers` are file descriptors.

    This loop is minimal: a plugin that used the pipe directly could not be faster.
    """
    task = TinyMLPerf.event(event)
    (shape, dtype), (answer_shape, answer_dtype) = wire.question_of(task), wire.answer_of(task)
    question = np.empty(shape, dtype)
    buffer = question.data.cast("B")
    while True:
        count = os.readv(questions, [buffer])
        while count < len(buffer):
            more = os.readv(questions, [buffer[count:]])
            if not more:
                return
            count += more
        result = np.ascontiguousarray(answer(question), answer_dtype)
        if result.shape != answer_shape:
            raise ValueError(f"an answer has the shape {result.shape}, but {answer_shape} is expected")
        if os.write(answers, result.data) != result.nbytes:
            raise OSError("an answer did not fit into the pipe")


def main() -> None:
    """Limit this process, load the plugin, and answer questions over the pipes; the sandbox's program."""
    role, event, user = sys.argv[1:4]
    tilewise.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    questions, answers = os.dup(0), os.dup(1)
    with Path(os.devnull).open("r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)  # so that output of the plugin is not taken for an answer
    TinyMLPerf.event(event)
    drop_root(int(user))
    limit_resources()
    fork_memory_reference()
    wire.send(answers, b"r")  # the plugin's memory is measured from here on
    (length,) = struct.unpack("<I", wire.receive(questions, 4))
    install_seccomp_filter(wire.receive(questions, length))
    answer = load_plugin(role, event)
    wire.send(answers, b"l")
    with contextlib.suppress(wire.Ended):
        serve(answer, event, questions, answers)


if __name__ == "__main__":
    main()
