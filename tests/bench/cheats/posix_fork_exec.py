# refused: Operation not permitted
import os
import sys

import _posixsubprocess


def load(event, folder):
    r, w = os.pipe()
    a = [[sys.executable.encode()], [sys.executable.encode()], True, (w,), None, None, -1, -1, -1, -1, -1, -1, r, w, False, False]
    a += [-1, None, None, None, -1, None, False]
    _posixsubprocess.fork_exec(*a)
    raise RuntimeError("it was allowed")
