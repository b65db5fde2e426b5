# harmless, memory below 0.85: a stack is memory
import ctypes
import threading

# honest
right = load


def load(event, folder):
    """Hold 8 MiB of arrays in the stack of a thread that waits."""
    threading.stack_size(16 << 20)
    libc, filled = ctypes.CDLL(None), threading.Event()
    order = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

    def fill():
        mark = ctypes.c_int()
        below = ctypes.create_string_buffer(1)
        # The kernel lets a thread write anywhere in its stack.
        here = ctypes.CDLL(None).pthread_self
        here.restype = ctypes.c_void_p
        ctypes.memset(here() - (12 << 20), 1, 8 << 20)
        filled.set()
        threading.Event().wait()

    threading.Thread(target=fill, daemon=True).start()
    filled.wait()
    return right(event, folder)
