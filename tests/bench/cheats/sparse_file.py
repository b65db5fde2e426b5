# refused: File too large
import os


def load(event, folder):
    with open("/tmp/large", "wb") as stream:
        os.ftruncate(stream.fileno(), 1 << 40)
    raise RuntimeError("it was allowed")
