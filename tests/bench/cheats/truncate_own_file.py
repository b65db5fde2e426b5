# refused: Operation not permitted
import os


def load(event, folder):
    os.truncate(folder / 'plugin.py', 1)
    raise RuntimeError("it was allowed")
