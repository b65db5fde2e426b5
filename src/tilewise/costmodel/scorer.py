"""Scores a kernel's configurations with NumPy alone: what the tuner and the dispatcher load at run time.

Reads the same file that training writes. Configurations are scored in chunks; nothing looks from one to another.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel import numpy_baselines, numpy_ranker
from tilewise.costmodel.gbdt import GBDT, restore_gbdt
from tilewise.costmodel.kernel import Kernel
from tilewise.costmodel.prepare import Preparation, Prepared
from tilewise.costmodel.schema import Schema
from tilewise.costmodel.trained import read_model_file
from tilewise.errors import FileFormatError


@dataclass(eq=False)
class Scorer:
    """A trained model in NumPy; `score` and `calibration` are what `rank` asks for."""

    name: str
    weights: dict[str, npt.NDArray[Any]]
    kwargs: dict[str, Any]
    preparation: Preparation
    schema: Schema
    record: dict[str, Any]

    @property
    def calibration(self) -> dict[str, Any] | None:
        return self.record.get("calibration")

    def score(self, kernel: Kernel, rows: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float32]:
        """One score per configuration, lower is faster."""
        part = self.preparation.apply(kernel, rows)
        try:
            return self._score(part)
        except (KeyError, ValueError, IndexError) as error:
            raise FileFormatError(
                f"The weights of this {self.name} do not fit its features; export it again."
            ) from error

    def exact(self, kernel: Kernel, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The scores of a few configurations in float64."""
        part = self.preparation.apply(kernel, rows)
        wide = Prepared(part.node.astype(np.float64), part.opcode, part.edges, part.config.astype(np.float64))
        weights = {name: array.astype(np.float64) for name, array in self.weights.items()}
        return np.asarray(dataclasses.replace(self, weights=weights)._score(wide), dtype=np.float64)

    def _score(self, part: Prepared) -> npt.NDArray[np.float32]:
        if self.name == "TileRanker":
            return numpy_ranker.forward(self.weights, self.kwargs, part)
        chunk = numpy_baselines.chunk_size(self.name, len(part.node))
        pieces = []
        for start in range(0, len(part.config), chunk):
            piece = Prepared(part.node, part.opcode, part.edges, part.config[start : start + chunk])
            pieces.append(numpy_baselines.forward(self.name, self.weights, self.kwargs, piece))
        return np.concatenate(pieces)


def load_scorer(path: str | Path) -> Scorer | GBDT:
    """The scorer in a model file, or in the folder of a training run.

    >>> load_scorer("model.safetensors").score(kernel).argmin()  # doctest: +SKIP
    17
    """
    file = read_model_file(path)
    if file.record["model"] == "GBDT":
        return restore_gbdt(file)
    kwargs = file.record.get("model_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise FileFormatError(f"{path} does not say how its model is built; export it again.")
    return Scorer(file.record["model"], file.weights, kwargs, file.preparation, file.schema, file.record)
