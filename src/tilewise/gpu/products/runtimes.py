"""Predicted runtimes of products on a GPU: kernels and the library's call in the same seconds, so that they compare.

Small networks say how far a runtime is from the arithmetic of `roofline.py`: a quick one for the
kernels that the arithmetic likes, an ensemble that judges the best of those again, and an ensemble for the library. The
members' disagreement is how unsure a prediction is. NumPy alone; some thousand configurations take a millisecond.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tilewise.errors import FileFormatError
from tilewise.gpu.products.roofline import (
    Numbers,
    columns,
    features,
    first_guess,
    floor_seconds,
    library_features,
)
from tilewise.io import load_arrays
from tilewise.store.problem import Config, Problem

Weights = npt.NDArray[np.float32]
FILE = "h200_products.safetensors"
_MOST_ROWS = 512  # kernels that the quick network sees of a long list
_JUDGED = 32  # kernels that the ensemble sees
_FAR = np.float32(3)  # no runtime is e^3 times away from the arithmetic, whatever a network says of sizes it never saw
_NETWORKS = ("kernel", "judge", "library")


@dataclass(frozen=True)
class Predicted:
    """Seconds of each configuration, and the relative deviation of the members about them."""

    seconds: Numbers
    deviation: Numbers


class Runtimes:
    """The model of one GPU, out of a file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        arrays, self.metadata = load_arrays(path)
        try:
            self._kernel, self._judge, self._library = (_ensemble(arrays, name) for name in _NETWORKS)
        except (KeyError, ValueError) as error:
            raise FileFormatError(f"{path} holds no model of runtimes; it lacks {error}.") from error

    def kernels(self, problem: Problem, of: Mapping[str, Numbers], batch: int = 1, most: int = _MOST_ROWS) -> Predicted:
        """Of kernels whose settings are columns (`roofline.columns`), in their order. Those that a stage leaves out
        stay behind those that the next one sees; `most` are left after the arithmetic."""
        guess = np.log(first_guess(problem, of, batch))
        seconds, deviation = np.exp(guess) * 10, np.ones(len(guess))
        asked = np.argpartition(guess, most)[:most] if len(guess) > most else np.arange(len(guess))
        rows = features(problem, {name: column[asked] for name, column in of.items()}, batch)
        quick = _predicted(self._kernel(rows) + rows[:, 0])
        first = np.argpartition(quick.seconds, _JUDGED)[:_JUDGED] if len(asked) > _JUDGED else np.arange(len(asked))
        found = _predicted(self._judge(rows[first]) + rows[first, 0])
        seconds[asked], deviation[asked] = np.maximum(quick.seconds, found.seconds.max(initial=0)), quick.deviation
        seconds[asked[first]], deviation[asked[first]] = found.seconds, found.deviation
        return Predicted(seconds, deviation)

    def library(self, problem: Problem, batch: int = 1) -> Predicted:
        """Of the library's call alone."""
        return _predicted(self._library(library_features(problem, batch)) + np.log(floor_seconds(problem, batch)))

    def predict(self, problem: Problem, configs: Sequence[Config], batch: int = 1) -> Predicted:
        """Of configurations of one problem, in their order; `library` among them wherever it stands."""
        library = np.array(["library" in config for config in configs])
        seconds, deviation = np.zeros(len(configs)), np.zeros(len(configs))
        kernels = [config for config in configs if "library" not in config]
        if kernels:
            found = self.kernels(problem, columns(kernels), batch)
            seconds[~library], deviation[~library] = found.seconds, found.deviation
        if library.any():
            found = self.library(problem, batch)
            seconds[library], deviation[library] = found.seconds[0], found.deviation[0]
        return Predicted(seconds, deviation)


def _predicted(logarithms: Numbers) -> Predicted:
    """The members' middle, and how far they are apart."""
    return Predicted(np.exp(logarithms.mean(axis=0)), logarithms.std(axis=0))


def _ensemble(arrays: dict[str, npt.NDArray[np.generic]], name: str) -> Callable[[Numbers], Weights]:
    """Networks of the same shape side by side, as a function from rows of features to (members, rows) of logarithms.
    The first layer is one matrix for all members, with what brings the features to a common scale worked into it; the
    later ones have a member first."""
    count = sum(key.startswith(f"{name}.weight") for key in arrays)
    layers = tuple(
        (arrays[f"{name}.weight{i}"].astype(np.float32), arrays[f"{name}.bias{i}"].astype(np.float32))
        for i in range(max(count, 1))
    )
    for (left, bias), (right, _) in zip(layers, (*layers[1:], layers[-1]), strict=True):
        if left.ndim != 3 or bias.ndim != 3 or (right is not left and left.shape[2] != right.shape[1]):
            raise ValueError(f"layers of {name} that fit each other")
    (weight, bias), mean, scale = layers[0], *(arrays[f"{name}.{of}"].astype(np.float64) for of in ("mean", "scale"))
    if len(layers) < 2 or mean.shape != scale.shape or mean.shape != weight.shape[1:2]:
        raise ValueError(f"layers of {name} that fit its features")
    wide = weight.astype(np.float64).transpose(1, 0, 2).reshape(len(mean), -1) / scale[:, None]
    first = wide.astype(np.float32)  # (features, members * width)
    first_bias = (bias.reshape(-1) - mean @ wide).astype(np.float32)  # (members * width,)

    def run(rows: Numbers) -> Weights:
        x = rows.astype(np.float32) @ first  # (rows, members * width)
        x += first_bias
        x = x.reshape(len(rows), len(layers[1][0]), -1).transpose(1, 0, 2)
        for weight, bias in layers[1:]:  # (members, in, out), (members, 1, out)
            x = np.maximum(x, 0) @ weight  # (members, rows, out)
            x += bias
        found: Weights = np.clip(x[..., 0], -_FAR, _FAR)
        return found

    return run


def shipped_folder() -> Path:
    return Path(str(files("tilewise.gpu.products")))


@lru_cache(maxsize=4)
def shipped_runtimes(name: str = FILE) -> Runtimes | None:
    """The model that comes with tilewise; None where it is not there."""
    path = shipped_folder() / name
    return Runtimes(path) if path.is_file() else None
