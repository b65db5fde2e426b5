# refused: has \['null', 'urandom'\]
import os


def load(event, folder):
    raise RuntimeError(f"has {sorted(os.listdir('/dev'))}")
