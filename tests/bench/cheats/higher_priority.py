# refused: Operation not permitted
import os


def load(event, folder):
    os.setpriority(os.PRIO_PROCESS, 0, -5)
    raise RuntimeError("it was allowed")
