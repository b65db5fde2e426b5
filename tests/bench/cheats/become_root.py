# refused: Operation not permitted
import os


def load(event, folder):
    os.setuid(0)
    raise RuntimeError("it was allowed")
