# refused: \(RuntimeError: \?\]0;owned\?\?\[2J
def load(event, folder):
    raise RuntimeError("\x1b]0;owned\x07\x1b[2J")
