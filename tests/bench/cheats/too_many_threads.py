# refused: can't start new thread
import threading


def load(event, folder):
    for _ in range(1000):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    raise RuntimeError("it was allowed")
