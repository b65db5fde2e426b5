"""load an ONNX file and run it"""

import numpy as np

from tilewise import Tensor, onnx

IMAGES = np.zeros((1, 1, 8, 8), np.float32)  # (N, C, H, W)


def prepare() -> None:
    from tilewise import models

    onnx.save(models.cnn(), "network.onnx", IMAGES)


def run() -> None:
    onnx.load("network.onnx")(Tensor(IMAGES))
