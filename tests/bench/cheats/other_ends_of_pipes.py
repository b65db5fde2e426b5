# refused: open \[3, 4\] beyond the first three
import os


def load(event, folder):
    arrays = []
    for descriptor in range(3, 64):
        try:
            os.fstat(descriptor)
            arrays.append(descriptor)
        except OSError:
            pass
    raise RuntimeError(f"open {arrays} beyond the first three")
