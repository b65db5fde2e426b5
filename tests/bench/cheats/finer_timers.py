# refused: Operation not permitted
import ctypes
import os

# honest
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(29, 1, 0, 0, 0):  # PR_SET_TIMERSLACK
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
