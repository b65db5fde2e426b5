# refused: Operation not permitted
import ctypes
import os


def load(event, folder):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(144, 0, 1, ctypes.byref(ctypes.c_int(50))) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    raise RuntimeError("it was allowed")
