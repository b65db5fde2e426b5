# refused: Operation not permitted
import ctypes
import os


def load(event, folder):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(29, 0x7469, 1 << 20, 0o1666) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    raise RuntimeError("it was allowed")
