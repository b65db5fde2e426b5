# harmless: processor time between questions is part of the time of the answers
import ctypes
import threading

# honest
libc = ctypes.CDLL(None)


def wait_for_all_cores():
    while True:
        libc.syscall(324, 1, 0, 0)  # MEMBARRIER_CMD_GLOBAL


for _ in range(8):
    threading.Thread(target=wait_for_all_cores, daemon=True).start()
