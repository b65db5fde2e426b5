# refused: files and folders it may
from pathlib import Path


def load(event, folder):
    for at in range(200_000):
        Path(f"/tmp/{at:0200d}").touch()
    raise RuntimeError("it was allowed")
