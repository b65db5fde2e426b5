"""Measure in fresh processes: each has a new memory layout, and a process that hangs can be killed.

A function object is measured in forked children; "module:function" is imported by new interpreters. A child replies
with one line of JSON; nothing is pickled.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilewise.errors import ConfigurationError, TilewiseError
from tilewise.profile.timer import Series, take_samples
from tilewise.profile.timing.limits import MeasurementError, TimeLimitError

_GRACE_SECONDS = 1.0  # a child stops itself at its time limit; it is killed if it has not stopped after this


def measure_in_processes(
    func: Callable[[], Any] | str, warmup: int, runs: int, processes: int, limit: float, sample_seconds: float
) -> Series:
    """Take `runs` samples in total in several fresh processes, one after the other.

    `limit` is the time limit in seconds for all of them.
    """
    shares = [runs // processes + (i < runs % processes) for i in range(processes)]
    deadline = time.perf_counter() + limit
    series = Series([], 1, processes=processes)
    for share in filter(None, shares):
        remaining = deadline - time.perf_counter()
        if remaining <= 0 and series.samples:
            series.notes.append(f"only {len(series.samples)} of {runs} samples fit into the time limit of {limit:g} s")
            break
        reply = _run_child(func, warmup, share, max(remaining, 0.01), sample_seconds)
        series.samples += reply["samples"]
        series.calls = max(series.calls, reply["calls"])
        series.reasons += [reason for reason in reply["reasons"] if reason not in series.reasons]
        series.notes += [note for note in reply["notes"] if note not in series.notes]
    return series


def _run_child(func: Callable[[], Any] | str, warmup: int, runs: int, limit: float, sample_seconds: float) -> Any:
    """Measure in one fresh process and return its samples; raise the error that it reports."""
    if isinstance(func, str):
        text = _new_interpreter(func, warmup, runs, limit, sample_seconds)
    else:
        text = _forked(lambda: _child_reply(func, warmup, runs, limit, sample_seconds), limit)
    try:
        reply = json.loads(text)
    except ValueError:
        raise MeasurementError(
            "the process that ran the function ended without a result; it may have crashed"
        ) from None
    if "error" in reply:
        kind = TimeLimitError if reply["time_limit"] else MeasurementError
        raise kind(reply["error"])
    return reply


def _child_reply(func: Callable[[], Any] | str, warmup: int, runs: int, limit: float, sample_seconds: float) -> str:
    """Time the function, in the child process, and return the samples or the error as JSON."""
    try:
        func = resolve(func) if isinstance(func, str) else func
        return json.dumps(asdict(take_samples(func, warmup, runs, limit, sample_seconds)))
    except TilewiseError as error:
        return json.dumps({"error": str(error), "time_limit": isinstance(error, TimeLimitError)})


def _forked(reply: Callable[[], str], limit: float) -> str:
    """Run `reply` in a forked child process and return its text; the child is killed after `limit` seconds."""
    if not hasattr(os, "fork"):
        raise ConfigurationError("this system cannot fork; name the function as 'module:function' instead")
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # no exception may escape: the child must not run on into the parent's code
        status = 1
        try:
            os.close(reader)
            with os.fdopen(writer, "w") as out:
                out.write(reply())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as source:
        text = _read_until(source.fileno(), limit + _GRACE_SECONDS)
    if text is None:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if text is None:
        raise TimeLimitError(f"the function did not return within {limit:.3g} s, so its process was killed")
    return text


def _read_until(descriptor: int, seconds: float) -> str | None:
    """Read a file descriptor to its end; None if that takes longer than `seconds`."""
    deadline = time.perf_counter() + seconds
    chunks: list[bytes] = []
    while True:
        remaining = deadline - time.perf_counter()
        if remaining <= 0 or not select.select([descriptor], [], [], remaining)[0]:
            return None
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            return b"".join(chunks).decode()
        chunks.append(chunk)


def _new_interpreter(name: str, warmup: int, runs: int, limit: float, sample_seconds: float) -> str:
    """Measure the function `name` in a new Python interpreter; return the last line of its output."""
    command = [sys.executable, "-m", "tilewise.profile.timing.processes", name]
    command += [str(warmup), str(runs), str(limit), str(sample_seconds)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p or str(Path.cwd()) for p in sys.path)}
    try:
        process = subprocess.run(
            command, stdout=subprocess.PIPE, env=environment, timeout=limit + 10 * _GRACE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise TimeLimitError(f"{name} did not return within {limit:.3g} s, so its process was killed") from None
    lines = process.stdout.decode(errors="replace").splitlines()
    return lines[-1] if lines else ""


def resolve(name: str) -> Callable[[], Any]:
    """Import the function named by "module:function"."""
    from importlib import import_module

    module, _, attribute = name.partition(":")
    target: Any = None
    with suppress(ImportError, ValueError):
        target = getattr(import_module(module), attribute, None)
    if not callable(target):
        raise ConfigurationError(f"{name!r} does not name a function; write it as 'package.module:function'")
    function: Callable[[], Any] = target
    return function


if __name__ == "__main__":
    _name, _warmup, _runs, _limit, _sample_seconds = sys.argv[1:]
    print("\n" + _child_reply(_name, int(_warmup), int(_runs), float(_limit), float(_sample_seconds)), flush=True)
