"""Locks that give one process exclusive use of a device while it times kernels.

Timings on the CPU exclude every other timing on the machine. Timings on a GPU exclude those on the same GPU and on the
CPU, but not those on other GPUs. The locks are `flock` locks on files that every process of the machine can open, so
the operating system releases them if a process dies.
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

_POLL_SECONDS = 0.005  # arbitrary; short compared with the timing of one kernel


@contextlib.contextmanager
def exclusive_device(kind: str, device: int, timeout_seconds: float) -> Iterator[bool]:
    """Lock a device for timing inside the block; yields False if that took longer than the timeout."""
    deadline = time.monotonic() + timeout_seconds
    # The machine's lock is shared by the GPUs and exclusive for the CPU.
    if kind == "cpu":
        locks = [("machine", fcntl.LOCK_EX)]
    else:
        locks = [("machine", fcntl.LOCK_SH), (f"gpu{device}", fcntl.LOCK_EX)]
    with contextlib.ExitStack() as stack:
        yield all(_acquire(stack.enter_context(_open_lock(name)), mode, deadline) for name, mode in locks)


@contextlib.contextmanager
def _open_lock(name: str) -> Iterator[int]:
    """Open a lock's file and yield its descriptor; a missing file is created.

    The file is opened for reading only, so that processes of different users can share it.
    """
    path = Path(tempfile.gettempdir()) / f"tilewise-timing-{name}.lock"
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise UnavailableError(f"The lock file {path} for timings cannot be opened ({error.strerror}).") from None
    try:
        yield file
    finally:
        os.close(file)


def _acquire(file: int, mode: int, deadline: float) -> bool:
    """Lock an open file, shared or exclusive (`mode`); return False if that fails until `deadline`."""
    while True:
        try:
            fcntl.flock(file, mode | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
