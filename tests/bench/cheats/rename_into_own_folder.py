# refused: Operation not permitted
import os
from pathlib import Path


def load(event, folder):
    Path('/tmp/a').write_bytes(b'x')
    os.rename('/tmp/a', folder / 'weights.bin')
    raise RuntimeError("it was allowed")
