# refused: Operation not permitted
import os
import sys


def load(event, folder):
    os.execv(sys.executable, [sys.executable])
    raise RuntimeError("it was allowed")
