# refused: Operation not permitted
import os


def load(event, folder):
    os.memfd_create('hidden')
    raise RuntimeError("it was allowed")
