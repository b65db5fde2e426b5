"""The reference models and their trained weights.

The three most important names: `cnn`, `gpt` (build a model) and `pretrained` (a model with shipped weights).
"""

from tilewise.models.pretrained import pretrained
from tilewise.models.reference import GPT_SIZES, ResidualBlock, ResNet8, cnn, gpt, image_model, mlp, resnet8, vgg6
from tilewise.models.saved import load_model

__all__ = [
    "GPT_SIZES",
    "ResNet8",
    "ResidualBlock",
    "cnn",
    "gpt",
    "image_model",
    "load_model",
    "mlp",
    "pretrained",
    "resnet8",
    "vgg6",
]
