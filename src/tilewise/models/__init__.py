"""The reference models and their trained weights.

The three most important names: `cnn`, `gpt` (build a model) and `pretrained` (a model with shipped weights).
"""

from typing import TYPE_CHECKING

from tilewise._late import late_names
from tilewise.models.reference import GPT_SIZES, ResidualBlock, ResNet8, cnn, gpt, image_model, mlp, resnet8, vgg6

if TYPE_CHECKING:
    from tilewise.models.saved import load_model, pretrained

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

__getattr__ = late_names(__name__, {".saved": "load_model pretrained"})  # an untrained model needs no data and no files
