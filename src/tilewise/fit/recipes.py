"""Training recipes of the reference models: data, batch size, learning rate, early stopping.

The held-out test images are used once, at the end; early stopping and the choice of the best epoch use validation
examples taken from the training set. For text the last tenth is used for validation, and there is no test set.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tilewise._files import read_input
from tilewise.errors import ConfigurationError, did_you_mean

NAMES = ("mlp", "cnn", "resnet8", "gpt")
_MAX_TEXT_BYTES = 1 << 28


@dataclass(frozen=True)
class FitRecipe:
    """All settings that determine a run's result; two runs with equal recipes give equal weights."""

    model: str
    data: str  # "digits", "topics", or the path of an MNIST folder or a text file
    epochs: int
    batch_size: int
    lr: float
    weight_decay: float
    patience: int  # stop after this many epochs without a better validation score
    validation: int = 0  # training examples used for validation; for text, windows of the validation set
    shift: int = 0  # augmentation: images are shifted by up to this many pixels
    context: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "patience"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 < self.lr < 10:
            raise ConfigurationError(f"the learning rate must be between 0 and 10, not {self.lr}")
        if not 0 <= self.seed < 2**32:
            raise ConfigurationError(f"the seed must be between 0 and 2^32 - 1, not {self.seed}")


_RECIPES = {
    ("mlp", "digits"): FitRecipe("mlp", "digits", 100, 32, 3e-3, 0.05, patience=40, validation=144, shift=1),
    ("cnn", "digits"): FitRecipe("cnn", "digits", 40, 32, 2e-3, 0.05, patience=20, validation=144, shift=1),
    ("resnet8", "digits"): FitRecipe("resnet8", "digits", 40, 32, 2e-3, 0.05, patience=15, validation=144, shift=1),
    ("resnet8", "mnist"): FitRecipe("resnet8", "mnist", 3, 64, 2e-3, 0.01, patience=3, validation=5000, shift=1),
    ("mlp", "mnist"): FitRecipe("mlp", "mnist", 20, 64, 1e-3, 0.01, patience=5, validation=5000),
    ("cnn", "mnist"): FitRecipe("cnn", "mnist", 5, 64, 2e-3, 0.01, patience=3, validation=5000, shift=1),
    ("gpt", "text"): FitRecipe("gpt", "topics", 20, 16, 2e-3, 0.1, patience=5, validation=32),
}


def recipe_for(
    model: str, data: str | None = None, epochs: int | None = None, seed: int = 0, lr: float | None = None
) -> FitRecipe:
    """Return the default recipe of `model`, with the arguments that are not None replaced."""
    if model not in NAMES:
        raise ConfigurationError(f"there is no recipe for {model!r}; {did_you_mean(model, NAMES)}")
    kind = "text" if model == "gpt" else "mnist" if data else "digits"
    changes: dict[str, Any] = {"data": data or None, "epochs": epochs, "lr": lr, "seed": seed}
    return replace(_RECIPES[model, kind], **{name: value for name, value in changes.items() if value is not None})


def read_text(path: str) -> str:
    """Read a text file of up to 256 MiB."""
    return read_input(path, _MAX_TEXT_BYTES).decode("utf-8", errors="replace")
