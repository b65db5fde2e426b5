# harmless: processor time between questions is part of the time of the answers
import threading

# honest


def nap():
    """Wait for a lock that nobody releases, a fraction of a millisecond at a time."""
    lock = threading.Lock()
    lock.acquire()
    while True:
        lock.acquire(timeout=1e-4)


threading.Thread(target=nap, daemon=True).start()
