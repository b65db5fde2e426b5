"""A limit on how long a piece of Python may take, so that one configuration that never ends does not end a collection.

The alarm is heard between two steps of the interpreter: a family written in Python is stopped wherever it is, a native
call only when it returns.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class TookTooLongError(Exception):
    """Raised inside the piece that did."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """TookTooLongError after so many seconds. Only the main thread hears alarms; elsewhere there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: Any) -> None:
        raise TookTooLongError(f"it did not end within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
