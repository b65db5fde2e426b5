# refused: Operation not permitted
import ctypes
import os

# honest
libc = ctypes.CDLL(None, use_errno=True)
if libc.syscall(251, 1, 0, 1 << 13):  # ioprio_set: real time
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
