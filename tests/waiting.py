"""What tests share that start processes: waiting for an event, and children that Ctrl-C reaches."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
# Seconds before a test gives up waiting. Only a hang takes that long, also on a machine with eight busy processes.
PATIENCE = 180.0


def until(holds: Callable[[], T], what: str = "the event", seconds: float = PATIENCE) -> T:
    """Call `holds` until it gives something true, and return that."""
    deadline = time.monotonic() + seconds
    while not (result := holds()):
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:.0f} s"
        time.sleep(0.02)
    return result


@contextmanager
def interruptible(interrupts: bool = True) -> Iterator[None]:
    """Children started inside die of SIGINT, or handle it, as those of a terminal do; or ignore it.

    A suite that runs in the background (`make test &` in a script, nohup, some CI systems) has SIGINT ignored, and
    children inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler if interrupts else signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
