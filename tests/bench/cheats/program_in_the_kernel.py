# refused: Operation not permitted
import ctypes
import os


def load(event, folder):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(321, 5, ctypes.create_string_buffer(128), 128) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    raise RuntimeError("it was allowed")
