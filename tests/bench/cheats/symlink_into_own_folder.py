# refused: Operation not permitted
import os


def load(event, folder):
    os.symlink('/tmp', folder / 'weights.bin')
    raise RuntimeError("it was allowed")
