# harmless: processor time between questions is part of the time of the answers
import ctypes
import threading

# honest
libc = ctypes.CDLL(None)


def interrupt():
    """Ask for memory barriers on all cores without end."""
    libc.syscall(324, 1 << 4, 0, 0)  # membarrier: register
    while True:
        libc.syscall(324, 1 << 3, 0, 0)  # MEMBARRIER_CMD_PRIVATE_EXPEDITED


threading.Thread(target=interrupt, daemon=True).start()
