"""Alone on a machine while something is timed: locks that every process of the machine sees, whoever started it.

A CPU's timings exclude everything else. A GPU's exclude those of the same GPU and of the CPU, and not each other's.
Locks are held by open files: a process that dies, however, gives them back.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tilewise.errors import UnavailableError

_LOOK_SECONDS = 0.005


@contextlib.contextmanager
def alone(kind: str, device: int, patience_seconds: float) -> Iterator[bool]:
    """The device to oneself, if that is so within `patience_seconds`; says whether it is."""
    until = time.monotonic() + patience_seconds
    with contextlib.ExitStack() as held:
        machine = fcntl.LOCK_EX if kind == "cpu" else fcntl.LOCK_SH
        wanted = [("machine", machine)] + ([] if kind == "cpu" else [(f"gpu{device}", fcntl.LOCK_EX)])
        yield all(_locked(held.enter_context(_opened(name)), how, until) for name, how in wanted)


@contextlib.contextmanager
def _opened(name: str) -> Iterator[int]:
    """A lock's file, made by whoever comes first and only read by everybody else, so that users share it."""
    path = Path(tempfile.gettempdir()) / f"tilewise-timing-{name}.lock"
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise UnavailableError(f"{path} keeps timings apart and cannot be opened ({error.strerror}).") from None
    try:
        yield file
    finally:
        os.close(file)


def _locked(file: int, how: int, until: float) -> bool:
    while True:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() > until:
                return False
            time.sleep(_LOOK_SECONDS)
