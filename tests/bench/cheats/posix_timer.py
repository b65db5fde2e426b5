# refused: Operation not permitted
import ctypes
import os


def load(event, folder):
    """A timer that interrupts whoever runs, the baseline included."""
    libc = ctypes.CDLL(None, use_errno=True)
    pointer = ctypes.c_void_p()
    if libc.timer_create(1, None, ctypes.byref(pointer)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    raise RuntimeError("it was allowed")
