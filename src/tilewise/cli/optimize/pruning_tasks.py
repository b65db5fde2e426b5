"""Tasks of `tilewise prune`: a trained model with batches to fine-tune on, tests of its quality, and a call to time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise import Tensor, data, models, no_grad
from tilewise._extension import native
from tilewise.cli.optimize.before_after import Task, answers
from tilewise.fit.tasks import random_shift
from tilewise.nn import Conv2d, Module, Sequential
from tilewise.nn import functional as F

Array = npt.NDArray[Any]


# Chosen on validation parts of the training digits and of the text (`python -m benchmarks.modules --epochs`): the cnn
# loses equally little after 10 and 20 epochs; the others lose less the longer they train, up to these numbers at least.
_EPOCHS = {"mlp": 400, "cnn": 20, "resnet8": 40, "gpt": 5}


class ImagePruning:
    """A classifier of images; fine-tuning shifts them by up to a pixel."""

    lr = 2e-3  # as the training of the models
    _BATCH = 64

    def __init__(self, task: Task, batch: int, seed: int) -> None:
        """Set up fine-tuning on the task's training images and timing of `batch` images."""
        self.name, self.model, self.images = task.name, task.model, task.data
        self.has_filters = any(isinstance(m, Conv2d) for m in self.model.modules())
        self.can_shrink = isinstance(self.model, Sequential | models.ResNet8)
        self.outputs_removed = "filters removed" if self.has_filters else "units removed"
        self.rng = np.random.default_rng(seed)
        self.batch, self.timed_call = batch, f"{batch} images"
        self.steps_per_epoch = -(-len(self.images.x_train) // self._BATCH)
        # MNIST's 60,000 images need fewer passes than the 1,437 digits.
        self.epochs = 2 if len(self.images.x_train) > 10_000 else _EPOCHS.get(self.name, 20)

    def loss(self, model: Module) -> Tensor:
        """Return the loss on a random batch of training images, shifted by up to one pixel."""
        rows = self.rng.integers(0, len(self.images.x_train), self._BATCH)
        x = self.images.x_train[rows]
        side = round((x.size // len(x)) ** 0.5)
        if x.shape[1:] in ((side * side,), (1, side, side)):
            x = random_shift(x.reshape(-1, 1, side, side), 1, self.rng).reshape(x.shape)
        return F.cross_entropy(model(Tensor(x)), self.images.y_train[rows])

    def calibration(self) -> list[Array]:
        return list(np.array_split(self.images.x_train[:256], 4))

    def validate(self, model: Module) -> float:
        x, y = self.images.x_train[-512:], self.images.y_train[-512:]
        return float((answers(model, x) == y).mean())

    def correct(self, model: Module) -> Array:
        correct: Array = answers(model, self.images.x_test) == self.images.y_test
        return correct

    def sample(self) -> Array:
        return self.images.x_test[: self.batch]

    def call(self, model: Module) -> Callable[[], Any]:
        """Return a function that runs the planned model."""
        x = Tensor(self.sample())
        planned: Any = model
        if native is not None:
            from tilewise.graph.plan import compile

            planned = compile(model, x)

        @no_grad()
        def run() -> Any:
            return planned(x)

        return run


class TextPruning:
    """The character GPT; quality is the share of characters that it predicts, per window of held-out text.

    The language reference repeats itself: a third of its last pages are also in the training text. The windows leave
    these passages out; those to test on are then the same with Python 3.11 and 3.12.
    """

    name, epochs, lr, can_shrink = "gpt", _EPOCHS["gpt"], 3e-3, False
    timed_call, outputs_removed = "128 tokens", ""
    _BATCH, _TOKENS = 8, 128

    def __init__(self, seed: int) -> None:
        """Load the character GPT and its text; `seed` draws the training batches."""
        self.model, text = models.pretrained("gpt"), data.text()
        context = self.model.context
        self.loader = data.TextLoader(text.train, self._BATCH, context, seed)
        self.steps_per_epoch = len(text.train) // (self._BATCH * context)
        self.train, middle = _windows(text.train, context), len(text.valid) // 2
        copied = copied_characters(text.valid, text.train)
        self.validation = _windows(text.valid[:middle], context, copied[:middle])
        self.test = _windows(text.valid[middle:], context, copied[middle:])
        self.prompt = text.valid[:32]

    def loss(self, model: Module) -> Tensor:
        x, y = self.loader.next()
        return F.cross_entropy(model(x), y)

    def calibration(self) -> list[Array]:
        return [window[None, :-1] for window in self.train[::50][:16]]

    def validate(self, model: Module) -> float:
        return float(_share_correct(model, self.validation).mean())

    def correct(self, model: Module) -> Array:
        return _share_correct(model, self.test)

    def sample(self) -> Array:
        return self.prompt[None, :1]

    def call(self, model: Any) -> Callable[[], Any]:
        """Return a function without arguments that generates tokens, to be timed."""
        from tilewise.generate import generate

        return lambda: list(generate(model, self.prompt, self._TOKENS))


def _windows(text: Array, context: int, excluded: Array | None = None) -> Array:
    """Split a text into windows (W, context + 1) whose inputs do not overlap and that have no excluded characters."""
    starts, start = [], 0
    while start + context < len(text):
        if excluded is not None and excluded[start : start + context + 1].any():
            start += int(np.flatnonzero(excluded[start : start + context + 1])[-1]) + 1
        else:
            starts.append(start)
            start += context
    windows: Array = text[np.array(starts, int)[:, None] + np.arange(context + 1)]
    return windows


def copied_characters(text: Array, source: Array, passage: int = 50) -> Array:
    """Return which characters of `text` are in passages of at least `passage` characters that `source` also has.

    50 characters are about the eight words that Radford et al. (2019, section 4) count as overlapping text.
    """
    characters, other = (ids.astype(np.uint8).tobytes() for ids in (text, source))
    passages = {other[i : i + passage] for i in range(len(other) - passage + 1)}
    copied = np.zeros(len(text), bool)
    for i in range(len(text) - passage + 1):
        if characters[i : i + passage] in passages:
            copied[i : i + passage] = True
    return copied


@no_grad()
def _share_correct(model: Module, windows: Array) -> Array:
    """Return, for each window (context + 1 characters), the share of characters predicted correctly."""
    shares = [
        (np.asarray(model(part[:, :-1])).argmax(-1) == part[:, 1:]).mean(1)
        for part in np.array_split(windows, -(-len(windows) // 16))
    ]
    return np.concatenate(shares)
