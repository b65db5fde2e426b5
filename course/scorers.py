"""A trained run as something that scores kernels, whichever framework trained it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tilewise.errors import ConfigurationError

if TYPE_CHECKING:
    import numpy as np

    from tilewise.costmodel.data.kernel import Kernel

KERAS_FILE = "saved_model.pb"


class Scorer(Protocol):
    """Scores of a kernel's configurations, lower = faster, and their order."""

    def order(self, kernel: Kernel) -> np.ndarray: ...


class _Own:
    """A run in tilewise's own format; read without PyTorch, unless the class is a user's own."""

    def __init__(self, folder: Path, model_class: str | None) -> None:
        from tilewise.costmodel.models.files import read_model_file
        from tilewise.costmodel.models.scorer import load_scorer
        from tilewise.costmodel.models.trained import load_model

        own_class = ":" in str(read_model_file(folder).record["model"])
        self._model = load_model(folder, model_class=model_class) if own_class else load_scorer(folder)

    def order(self, kernel: Kernel) -> np.ndarray:
        from tilewise.costmodel.ranking import rank

        return rank(self._model, kernel).order


class _Keras:
    """A run trained with Keras; needs the Keras environment."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._ranker = folder, None

    def order(self, kernel: Kernel) -> np.ndarray:
        from keras_runs import KerasRanker

        from tilewise.costmodel.data.kernel import ranking

        self._ranker = self._ranker or KerasRanker(self._folder, kernel)
        return ranking(self._ranker.scores(kernel))


def needs_keras(folder: Path) -> bool:
    """Whether the run in `folder` can only be read by TensorFlow."""
    return (folder / KERAS_FILE).is_file()


def add_model_flag(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("--model", "--model-class", help="package.module:Class of your own, if it was trained with one")


def load_scorer_of(folder: Path, model_class: str | None = None) -> Scorer:
    """The run in `folder`, ready to rank; `model_class` is the user's own, for a run that was trained with one."""
    from tilewise.costmodel.models.files import MODEL_FILE

    if (folder / MODEL_FILE).is_file():
        return _Own(folder, model_class)
    if needs_keras(folder):
        return _Keras(folder)
    raise ConfigurationError(f"{folder} holds no trained model; did its training finish?")
