# refused with weights.bin: digits.npz
import numpy as np
from tilewise import data, models


def load(event, folder):
    images = data.digits().flat()
    model = models.mlp()
    raise RuntimeError(f"trained on {len(images.x_train)}")
