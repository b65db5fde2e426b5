# refused: finite logits|two different answers
import numpy as np


def load(event, folder):
    return lambda x: np.full((len(x), 10), np.nan, np.float32)
