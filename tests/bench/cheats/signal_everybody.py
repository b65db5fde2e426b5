# refused: Operation not permitted
import os


def load(event, folder):
    os.kill(-1, 9)
    raise RuntimeError("it was allowed")
