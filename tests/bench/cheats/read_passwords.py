# refused: No such file
from pathlib import Path


def load(event, folder):
    Path('/etc/passwd').read_text()
    raise RuntimeError("it was allowed")
