# harmless: processor time between questions is part of the time of the answers
import threading
import time

# honest


def nap():
    """Keeps its core from falling asleep, which no single nap betrays."""
    while True:
        time.sleep(2e-5)


threading.Thread(target=nap, daemon=True).start()
