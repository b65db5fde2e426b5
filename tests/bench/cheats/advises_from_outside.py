# refused: Operation not permitted
import ctypes
import os

# honest
libc = ctypes.CDLL(None, use_errno=True)
if libc.syscall(440, 0, 0, 0, 21, 0):  # process_madvise: MADV_PAGEOUT
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
