# harmless: processor time between questions is part of the time of the answers
import threading
import time

# honest


def nap():
    """Wake up often enough that the core does not enter a deep sleep, at little processor time."""
    while True:
        time.sleep(1000e-6)


threading.Thread(target=nap, daemon=True).start()
