"""A time limit on somebody else's function, and the sentences for functions that raise or never end.

In the main thread the limit is an interval timer whose signal handler raises, which interrupts Python code and most
system calls (sleeping, waiting, reading). In other threads the exception is planted by the interpreter and arrives at
the next bytecode. Compiled code that never returns cannot be interrupted from inside its own process: measure it in a
fresh one (`processes=1`), which is killed.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from tilewise.errors import TilewiseError


class MeasurementError(TilewiseError, RuntimeError):
    """The function that was to be measured raised, died, or cannot be measured."""


class TimeLimitError(MeasurementError, TimeoutError):
    """The function had not returned when its time was up."""


class TimeIsUp(BaseException):
    """Raised inside the measured function; a BaseException so that its own `except Exception` does not swallow it."""


def _raise_time_is_up(_signal: int, _frame: FrameType | None) -> None:
    raise TimeIsUp


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise TimeIsUp inside the block once `seconds` have passed. None or infinity means no limit."""
    if seconds is None or seconds == float("inf"):
        yield
    elif _main_thread_timer_is_free():
        with _signal_limit(seconds):
            yield
    else:
        with _thread_limit(seconds):
            yield


def _main_thread_timer_is_free() -> bool:
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        return False
    handler = signal.getsignal(signal.SIGALRM)
    return signal.getitimer(signal.ITIMER_REAL)[0] == 0.0 and handler in (signal.SIG_DFL, signal.SIG_IGN)


@contextmanager
def _signal_limit(seconds: float) -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, _raise_time_is_up)
    # Repeated, should the function swallow the first exception, but not so soon as to strike our own cleaning up.
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6), 5.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _thread_limit(seconds: float) -> Iterator[None]:
    thread = ctypes.c_ulong(threading.get_ident())
    lock = threading.Lock()
    finished = False

    def plant() -> None:
        with lock:
            if not finished:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(TimeIsUp))

    watchdog = threading.Timer(seconds, plant)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()
        with suppress(TimeIsUp), lock:
            finished = True
