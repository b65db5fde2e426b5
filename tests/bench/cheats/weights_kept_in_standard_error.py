# refused: Bad file descriptor
import os


def load(event, folder):
    os.write(2, bytes(1 << 20))
    os.pread(2, 1 << 20, 0)
    raise RuntimeError("it was allowed")
