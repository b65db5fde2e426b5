"""quantize a network to INT8 and run it"""

import numpy as np

from tilewise import Tensor, models
from tilewise.quantize import quantize


def run() -> None:
    images = np.random.default_rng(0).random((4, 1, 8, 8), np.float32)  # (N, C, H, W)
    quantize(models.cnn(), [images])(Tensor(images))
