# refused: Operation not permitted
import os
import signal


def load(event, folder):
    for pid in range(2, 5000):
        os.kill(pid, signal.SIGSTOP)
    raise RuntimeError("it was allowed")
