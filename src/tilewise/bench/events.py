"""The events: which model, which data, what is timed, and what an answer must be worth.

Two kinds of inputs appear everywhere. *Public* ones are the whole held-out data, on which the accuracy floor is judged;
*drawn* ones are made from fresh randomness when an entry is validated, so that nobody can have answered them before.
The reference that answers are compared with is the shipped model, run plainly: NumPy, float32, no cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise import data, models
from tilewise.bench.drawing import spliced_prompts, transformed_digits
from tilewise.errors import ConfigurationError, did_you_mean, type_name
from tilewise.nn import Module

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Event:
    """One competition; a timed call is a batch of `batch` images, or a prompt with `new_tokens` to generate."""

    name: str
    title: str
    model_name: str
    kind: str  # "images", "text" or "tiles"
    rules: str
    batch: int = 1
    prompt_tokens: int = 0
    new_tokens: int = 0
    points_to_lose: float = 1.0  # accuracy may fall by this much below the shipped model's
    agreement: float = 0.95  # share of drawn inputs on which the class must be the reference's
    runs: int = 24  # timed samples of each side, unless the settings say otherwise
    baseline_over_arithmetic: float = 1.0  # plain tilewise over its bare matrix products; see integrity.py

    def __str__(self) -> str:
        return self.name

    def model(self) -> Module:
        """Load the shipped model with its trained weights, in evaluation mode."""
        self.check_timed()
        return models.pretrained(self.model_name)

    def check_timed(self) -> None:
        """Raise for an event that ranks predictions and has no model to time."""
        if self.kind == "tiles":
            raise ConfigurationError(f"{self.name} scores a file of predictions; it has no model to time")

    def public_inputs(self) -> Array:
        """Return the inputs known to everybody: all held-out images, or 16 prompts from the held-out text."""
        if self.kind == "images":
            images: Array = _images(self.model_name).x_test
            return images
        text = data.text().valid
        starts = np.linspace(0, len(text) - self.prompt_tokens, 16).astype(np.int64)
        windows: Array = text[starts[:, None] + np.arange(self.prompt_tokens)]
        return windows

    def public_labels(self) -> Array:
        """Return the classes of the held-out images."""
        return _images(self.model_name).y_test

    def training_images(self) -> tuple[Array, Array]:
        images = _images(self.model_name)
        return images.x_train, images.y_train

    def draw(self, rng: np.random.Generator, count: int) -> Array:
        """Draw `count` new inputs: transformed digits, or spliced prompts (see drawing.py)."""
        if self.kind == "images":
            return self.draw_labelled(rng, count, held_out=True)[0]
        corpus = data.text()
        return spliced_prompts(np.concatenate([corpus.train, corpus.valid]), self.prompt_tokens, rng, count)

    def draw_labelled(self, rng: np.random.Generator, count: int, held_out: bool = False) -> tuple[Array, Array]:
        """Draw new images with their classes: transformed training digits, and held-out ones too if `held_out`.

        An entry's own weights may have been trained on the held-out digits, so accuracy is checked without them.
        """
        images = _images(self.model_name)
        x, y = images.x_train, images.y_train
        if held_out:
            x, y = np.concatenate([x, images.x_test]), np.concatenate([y, images.y_test])
        indices = rng.integers(0, len(x), count)
        return self.transform(x[indices], rng), y[indices]

    def transform(self, images: Array, rng: np.random.Generator) -> Array:
        """Convert images to the model's input form, slightly transformed and with noise."""
        return transformed_digits(images.reshape(-1, 1, 8, 8), rng).reshape(images.shape)

    def timed_inputs(self, rng: np.random.Generator, calls: int) -> list[Array]:
        """Draw the inputs of `calls` timed calls: batches of images, or single prompts."""
        if self.kind == "images":
            return list(self.draw(rng, calls * self.batch).reshape(calls, self.batch, *self.input_shape))
        return list(self.draw(rng, calls))

    @property
    def input_shape(self) -> tuple[int, ...]:
        return _images(self.model_name).x_test.shape[1:]

    @property
    def unit(self) -> str:
        return "images" if self.kind == "images" else "tokens"

    @property
    def units_per_call(self) -> int:
        return self.batch if self.kind == "images" else self.new_tokens


@lru_cache(maxsize=2)
def _images(model_name: str) -> data.ImageData:
    images = data.digits()
    return images.flat() if model_name == "mlp" else images


class TinyMLPerf:
    """The events of the competition.

    >>> TinyMLPerf.MLP_SPRINT.batch
    32
    """

    MLP_SPRINT = Event(
        "MLP_SPRINT",
        "MLP sprint",
        "mlp",
        "images",
        "Classify a batch of 32 digits with the shipped mlp (64-256-128-10). At most 1 point of accuracy may be lost.",
        batch=32,
        baseline_over_arithmetic=2.5,
    )
    CNN_MARATHON = Event(
        "CNN_MARATHON",
        "CNN marathon",
        "cnn",
        "images",
        "Classify a batch of 32 digits with the shipped cnn (3 convolutions). At most 1 point of accuracy may be lost.",
        batch=32,
        baseline_over_arithmetic=4.5,
    )
    TRANSFORMER_DECATHLON = Event(
        "TRANSFORMER_DECATHLON",
        "Transformer decathlon",
        "gpt",
        "text",
        "Continue a prompt of 32 characters by 200, each the most likely one. Every token must be the shipped gpt's.",
        prompt_tokens=32,
        new_tokens=200,
        runs=12,
        points_to_lose=0.0,
        agreement=1.0,
        baseline_over_arithmetic=3.5,
    )
    TILE_OLYMPIAD = Event(
        "TILE_OLYMPIAD",
        "Tile olympiad",
        "",
        "tiles",
        "Name the five most promising configurations of every kernel of the split, as a CSV; scored by tile score.",
    )

    @classmethod
    def events(cls) -> tuple[Event, ...]:
        return (cls.MLP_SPRINT, cls.CNN_MARATHON, cls.TRANSFORMER_DECATHLON, cls.TILE_OLYMPIAD)

    @classmethod
    def event(cls, name: str | Event) -> Event:
        """Return the event of this name; the error for an unknown name lists all events."""
        for event in cls.events():
            if name is event or str(name).upper().replace(" ", "_") == event.name:
                return event
        names, text = [event.name for event in cls.events()], name if isinstance(name, str) else type_name(name)
        raise ConfigurationError(f"there is no event {text[:80]!r}; {did_you_mean(text[:80], names)}")

    def __class_getitem__(cls, name: str) -> Event:
        return cls.event(name)
