# refused: below the floor|is right
import numpy as np


def load(event, folder):
    return lambda x: np.zeros((len(x), 10), np.float32)
