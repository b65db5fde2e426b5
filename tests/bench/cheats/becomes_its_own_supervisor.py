# refused: not permitted|allowed
import os


def load(event, folder):
    if os.fork():
        os._exit(0)
    raise RuntimeError("it was allowed")
