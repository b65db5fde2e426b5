# refused: Operation not permitted
import ctypes
import os


def load(event, folder):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(248, b"user", b"kept", b"x", 1, -3) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    raise RuntimeError("it was allowed")
