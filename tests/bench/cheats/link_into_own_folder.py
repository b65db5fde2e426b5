# refused: Operation not permitted
import os


def load(event, folder):
    os.link('/tmp', folder / 'weights.bin')
    raise RuntimeError("it was allowed")
