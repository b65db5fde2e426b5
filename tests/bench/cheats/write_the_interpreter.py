# refused: Read-only file system
import os


def load(event, folder):
    (folder.parent / 'site' / 'tilewise' / 'new.py').write_bytes(b'x')
    raise RuntimeError("it was allowed")
