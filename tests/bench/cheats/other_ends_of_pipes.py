# refused: open \[3, 4\] beyond the first three
import os


def load(event, folder):
    found = []
    for descriptor in range(3, 64):
        try:
            os.fstat(descriptor)
            found.append(descriptor)
        except OSError:
            pass
    raise RuntimeError(f"open {found} beyond the first three")
