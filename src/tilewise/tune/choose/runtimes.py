"""Predicted runtimes of products on a GPU: kernels and the library's call in the same seconds, so that they compare.

Two small ensembles of networks, one for kernels and one for the library, say how far a runtime is from the arithmetic
of `families/triton/roofline.py`. The members' disagreement is how unsure a prediction is. NumPy alone; some thousand
configurations take a millisecond or two.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tilewise.errors import FileFormatError
from tilewise.io import load_arrays
from tilewise.tune.families.triton.roofline import Numbers, columns, features, floor_seconds, library_features
from tilewise.tune.problem import Config, Problem

Weights = npt.NDArray[np.float32]
FILE = "h200_products.safetensors"
_NETWORKS = ("kernel", "library")


@dataclass(frozen=True)
class Predicted:
    """Seconds of each configuration, and the relative deviation of the members about them."""

    seconds: Numbers
    deviation: Numbers

    def order(self) -> list[int]:
        """Places of the configurations, the fastest first."""
        return [int(place) for place in np.argsort(self.seconds, kind="stable")]


@dataclass(frozen=True)
class Ensemble:
    """Networks of the same shape side by side: each array has a member first."""

    mean: Weights  # (features,)
    scale: Weights  # (features,)
    layers: tuple[tuple[Weights, Weights], ...]  # (members, in, out), (members, 1, out)

    def __call__(self, rows: Numbers) -> Weights:
        """(members, rows) of logarithms."""
        x = ((rows - self.mean) / self.scale).astype(np.float32)[None]  # (1, rows, features)
        for place, (weight, bias) in enumerate(self.layers):
            x = x @ weight + bias  # (members, rows, out)
            if place < len(self.layers) - 1:
                x = np.maximum(x, np.float32(0))
        return np.asarray(x[..., 0])


class Runtimes:
    """The model of one GPU, out of a file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        arrays, self.metadata = load_arrays(path)
        try:
            self._kernel, self._library = (_ensemble(arrays, name) for name in _NETWORKS)
        except (KeyError, ValueError) as error:
            raise FileFormatError(f"{path} holds no model of runtimes; it lacks {error}.") from error

    def predict(self, problem: Problem, configs: Sequence[Config], batch: int = 1) -> Predicted:
        """Of configurations of one problem, in their order; `library` among them wherever it stands."""
        library = np.array(["library" in config for config in configs])
        found = np.zeros((len(self._kernel.layers[0][0]), len(configs)))
        if not library.all():
            kernels = [config for config in configs if "library" not in config]
            rows = features(problem, _columns(tuple(kernels)), batch)
            found[:, ~library] = self._kernel(rows) + rows[:, 0]
        if library.any():
            rows = library_features(problem, batch)
            found[:, library] = self._library(rows) + np.log(floor_seconds(problem, batch))
        return Predicted(np.exp(found.mean(axis=0)), found.std(axis=0))


@lru_cache(maxsize=16)
def _columns(configs: tuple[Config, ...]) -> dict[str, Numbers]:
    return columns(configs)


def _ensemble(arrays: dict[str, npt.NDArray[np.generic]], name: str) -> Ensemble:
    count = sum(key.startswith(f"{name}.weight") for key in arrays)
    layers = tuple(
        (arrays[f"{name}.weight{i}"].astype(np.float32), arrays[f"{name}.bias{i}"].astype(np.float32))
        for i in range(max(count, 1))
    )
    for (left, bias), (right, _) in zip(layers, (*layers[1:], layers[-1]), strict=True):
        if left.ndim != 3 or bias.ndim != 3 or (right is not left and left.shape[2] != right.shape[1]):
            raise ValueError(f"layers of {name} that fit each other")
    return Ensemble(arrays[f"{name}.mean"].astype(np.float32), arrays[f"{name}.scale"].astype(np.float32), layers)


def shipped_folder() -> Path:
    return Path(str(files("tilewise.tune.families.triton")))


@lru_cache(maxsize=4)
def shipped_runtimes(name: str = FILE) -> Runtimes | None:
    """The model that comes with tilewise; None where it is not there."""
    path = shipped_folder() / name
    return Runtimes(path) if path.is_file() else None
