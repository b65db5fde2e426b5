# refused: Operation not permitted
import ctypes
import os


def load(event, folder):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(425, 8, ctypes.create_string_buffer(120)) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    raise RuntimeError("it was allowed")
