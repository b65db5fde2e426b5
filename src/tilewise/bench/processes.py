"""Processes that belong together end together."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PARENT = "TILEWISE_PARENT"


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the one that started it ends, however it ends."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0)
    if os.environ.get(_PARENT, str(os.getppid())) != str(os.getppid()):  # the parent ended before prctl was called
        sys.exit(0)


def child_environment() -> dict[str, str]:
    """Return the environment variables that a child needs in order to call `die_with_parent`."""
    return {_PARENT: str(os.getpid())}
