# refused: No such file
from pathlib import Path


def load(event, folder):
    Path('/proc/self/clear_refs').write_text('5')
    raise RuntimeError("it was allowed")
