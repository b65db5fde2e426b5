# refused: Operation not permitted
import os


def load(event, folder):
    os.write(os.pipe()[1], bytes(60_000))
    raise RuntimeError("it was allowed")
