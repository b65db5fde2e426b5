# refused: the shape
import numpy as np


def load(event, folder):
    return lambda x: np.zeros((len(x), 11), np.float32)
