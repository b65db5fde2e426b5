# refused: for a processor core|no answer
import threading

# honest


def load(event, folder):
    """Wait for a core among threads of its own, so that the machine is blamed for an answer that never comes."""
    for _ in range(20):
        threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
    return lambda x: threading.Event().wait()
