# refused: No such file
from pathlib import Path


def load(event, folder):
    Path('/var/lib/board.sqlite').read_bytes()
    raise RuntimeError("it was allowed")
