"""Time limits for user functions, and the errors for functions that raise or never return.

In the main thread the limit is an interval timer whose signal handler raises; it interrupts Python code and most
system calls (sleeping, waiting, reading). In other threads the interpreter raises an asynchronous exception at the next
bytecode. Compiled code that never returns cannot be interrupted from inside its own process: measure it in a fresh
process (`processes=1`), which can be killed.
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
    """The measured function raised, its process died, or it cannot be measured."""


class TimeLimitError(MeasurementError, TimeoutError):
    """The function did not return within its time limit."""


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
    """Tell whether SIGALRM can be used: this is the main thread, without a timer or handler."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        return False
    handler = signal.getsignal(signal.SIGALRM)
    return signal.getitimer(signal.ITIMER_REAL)[0] == 0.0 and handler in (signal.SIG_DFL, signal.SIG_IGN)


@contextmanager
def _signal_limit(seconds: float) -> Iterator[None]:
    """Raise TimeIsUp in the block after `seconds`, from a SIGALRM handler."""
    previous_handler = signal.getsignal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, _raise_time_is_up)
    try:
        # The signal repeats in case the function swallows the first exception; 5 s leave enough time for our cleanup.
        # A shorter limit could raise before the caller's block is entered, which nothing would clean up.
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 5.0)
        yield
    finally:
        # An alarm that arrives here raises and skips the rest, so that the handler would stay: repeat once.
        for _ in range(2):
            with suppress(TimeIsUp):
                signal.setitimer(signal.ITIMER_REAL, 0.0)
                signal.signal(signal.SIGALRM, previous_handler)


@contextmanager
def _thread_limit(seconds: float) -> Iterator[None]:
    """Raise TimeIsUp in the block after `seconds`, as an asynchronous exception in this thread."""
    thread = ctypes.c_ulong(threading.get_ident())
    lock = threading.Lock()
    finished = False

    def interrupt() -> None:
        with lock:
            if not finished:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(TimeIsUp))

    watchdog = threading.Timer(seconds, interrupt)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()
        with suppress(TimeIsUp), lock:
            finished = True
