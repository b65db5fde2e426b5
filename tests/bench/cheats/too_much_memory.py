# refused: emory
import numpy as np


def load(event, folder):
    np.ones(1 << 30)
    raise RuntimeError("it was allowed")
