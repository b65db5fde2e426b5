"""Training tasks: a model with its batches, loss and score. Images are scored by accuracy, text by loss.

Every batch is a function of the seed and a position, so a task's state is a few integers.

A recipe states data, batch size, learning rate and early stopping. The held-out test images are used once, at the end;
early stopping and the choice of the best epoch use validation examples taken from the training set. For text the last
tenth is used for validation, and there is no test set.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise import data, models
from tilewise._files import read_input
from tilewise.errors import ConfigurationError, did_you_mean
from tilewise.nn import Module
from tilewise.nn import functional as F
from tilewise.tensor import Tensor, no_grad

Array = npt.NDArray[Any]
Batch = tuple[Array, Array]


NAMES = ("mlp", "cnn", "resnet8", "gpt")
_MAX_TEXT_BYTES = 1 << 28


class ImageTask:
    """The mlp, the cnn or the resnet8 on digits or MNIST."""

    higher_is_better = True

    def __init__(self, recipe: FitRecipe) -> None:
        """Load the images, create the model, and split validation examples off the training set."""
        images = data.digits() if recipe.data == "digits" else data.mnist(recipe.data)
        size = images.x_train.shape[-1]
        self.name = recipe.model
        self.model: Module = models.image_model(self.name, size, recipe.seed)
        # The seed's second number is larger than any epoch, so that this draw differs from all shuffles.
        order = np.random.default_rng([recipe.seed, 2**32]).permutation(len(images.x_train))
        valid, train = np.split(order, [min(recipe.validation, len(order) // 2)])
        self.valid = images.x_train[valid], images.y_train[valid]
        self.tests = images.x_test, images.y_test
        self.loader = data.BatchLoader(images.x_train[train], images.y_train[train], recipe.batch_size, recipe.seed)
        self.steps_per_epoch, self.shift = len(self.loader), recipe.shift

    def batches(self) -> Iterator[Batch]:
        """Yield the epoch's batches of images and labels, the images shifted at random by up to `shift` pixels."""
        for x, y in self.loader:
            rng = np.random.default_rng([self.loader.seed, self.loader.epoch, self.loader.batch])
            yield (random_shift(x, self.shift, rng) if self.shift else x), y

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.predict(batch[0]), batch[1])

    def predict(self, x: Array) -> Tensor:
        logits: Tensor = self.model(Tensor(data.model_inputs(self.name, x)))
        return logits

    def validate(self) -> float:
        return self.accuracy(*self.valid)

    def test(self) -> dict[str, float]:
        return {"test_accuracy": self.accuracy(*self.tests)}

    def accuracy(self, x: Array, y: Array) -> float:
        """Return the fraction of images x that are classified as their labels y, in eval mode."""
        self.model.eval()
        with no_grad():
            correct = sum(
                int((self.predict(x[i : i + 256]).data.argmax(axis=1) == y[i : i + 256]).sum())
                for i in range(0, len(x), 256)
            )
        self.model.train()
        return correct / max(len(x), 1)

    def state(self) -> dict[str, int]:
        return self.loader.state_dict()

    def restore(self, state: dict[str, int]) -> None:
        self.loader.load_state_dict(state)


def random_shift(x: Array, max_shift: int, rng: np.random.Generator) -> Array:
    """Shift each image (N, 1, H, W) by a random number of pixels in both directions, filling with zeros."""
    n, _, h, w = x.shape
    padded = np.pad(x, ((0, 0), (0, 0), (max_shift, max_shift), (max_shift, max_shift)))
    offsets = rng.integers(0, 2 * max_shift + 1, (2, n, 1))
    rows, columns = offsets[0] + np.arange(h), offsets[1] + np.arange(w)  # (N, H), (N, W)
    images: Array = padded[np.arange(n)[:, None, None], 0, rows[:, :, None], columns[:, None, :]]
    return images[:, None]


class TextTask:
    """The character GPT. An epoch has as many batches as are needed to cover the text's length once."""

    higher_is_better = False

    def __init__(self, recipe: FitRecipe) -> None:
        """Load the text, create the model, and choose evenly spaced validation windows."""
        text = data.text(None if recipe.data == "topics" else read_text(recipe.data))
        self.context = recipe.context
        if len(text.valid) <= self.context:
            raise ConfigurationError(
                f"the text is too short: give at least {10 * (self.context + 1)} characters, a tenth is for validation"
            )
        self.model: Module = models.gpt("4x128", vocab=len(text.vocabulary), context=self.context, seed=recipe.seed)
        self.loader = data.TextLoader(text.train, recipe.batch_size, self.context, recipe.seed)
        self.steps_per_epoch = max(1, len(text.train) // (recipe.batch_size * self.context))
        starts = np.linspace(0, len(text.valid) - self.context - 1, recipe.validation).astype(np.int64)
        self.windows = text.valid[starts[:, None] + np.arange(self.context + 1)]  # (W, T+1)
        self.in_epoch = 0

    def batches(self) -> Iterator[Batch]:
        """Yield the remaining batches of this epoch: token ids and the ids that follow them, each (B, T)."""
        while self.in_epoch < self.steps_per_epoch:
            self.in_epoch += 1
            yield self.loader.next()
        self.in_epoch = 0

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    @no_grad()
    def validate(self) -> float:
        """Return the mean validation loss in nats per character."""
        losses = [self.loss((w[:, :-1], w[:, 1:])).item() for w in np.array_split(self.windows, 4)]
        return float(np.mean(losses))

    def test(self) -> dict[str, float]:
        nats = self.validate()
        return {"valid_loss": nats, "bits_per_character": nats / float(np.log(2))}

    def state(self) -> dict[str, int]:
        return self.loader.state_dict() | {"in_epoch": self.in_epoch}

    def restore(self, state: dict[str, int]) -> None:
        self.loader.load_state_dict(state)
        self.in_epoch = int(state["in_epoch"])


def task_for(recipe: FitRecipe) -> ImageTask | TextTask:
    """Create the task of a recipe."""
    return TextTask(recipe) if recipe.model == "gpt" else ImageTask(recipe)


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
