# refused: Read-only file system
def load(event, folder):
    (folder / 'weights.bin').write_bytes(b'x')
    raise RuntimeError("it was allowed")
