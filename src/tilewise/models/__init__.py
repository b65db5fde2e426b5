"""The reference models and their trained weights.

The three most important names: `cnn`, `gpt` (build a model) and `pretrained` (a model with shipped weights).
"""

from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    # Imported at first use: an untrained model needs neither data nor files.
    if name in ("load_model", "pretrained"):
        from tilewise.models import saved

        return getattr(saved, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
