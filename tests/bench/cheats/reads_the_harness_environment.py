# refused: seen \['HOME', 'LANG', 
import os


def load(event, folder):
    raise RuntimeError(f"seen {sorted(os.environ)}")
