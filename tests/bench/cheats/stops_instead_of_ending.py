# refused: not permitted|it was not stopped
import os
import signal


def load(event, folder):
    os.kill(os.getpid(), signal.SIGSTOP)
    raise RuntimeError("it was not stopped")
