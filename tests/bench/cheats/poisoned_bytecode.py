# refused: Read-only file system
from pathlib import Path

import tilewise


def load(event, folder):
    folder = Path(tilewise.__file__).parent / "bench" / "__pycache__"
    folder.mkdir(exist_ok=True)
    (folder / "scoring.cpython-311.pyc").write_bytes(b"x")
    raise RuntimeError("it was allowed")
