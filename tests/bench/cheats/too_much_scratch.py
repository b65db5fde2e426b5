# refused: No space left
from pathlib import Path


def load(event, folder):
    Path('/tmp/large').write_bytes(bytes(64 << 20))
    raise RuntimeError("it was allowed")
