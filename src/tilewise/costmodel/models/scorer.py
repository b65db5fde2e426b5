"""Scores a kernel's configurations with NumPy alone: what the tuner and the dispatcher load at run time.

Reads the same file that training writes. Configurations are scored in chunks; nothing looks from one to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import Schema
from tilewise.costmodel.features.ranker import RankerFeatures
from tilewise.costmodel.features.scaling import Preparation, Prepared
from tilewise.costmodel.models import ridge
from tilewise.costmodel.models.blend import Blend, restore_blend
from tilewise.costmodel.models.files import write_tensors
from tilewise.costmodel.models.gbdt import GBDT, restore_gbdt
from tilewise.costmodel.models.numpy import baselines, ranker
from tilewise.costmodel.models.numpy.tabled import Tabled
from tilewise.costmodel.models.trained import BLEND, Contents, ModelFile, file_contents, fitting, read_model_file
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
    _folded: dict[str, ranker.Folded] = field(default_factory=dict, repr=False)
    _last: tuple[Kernel, Prepared] | None = field(default=None, repr=False)
    _seen: npt.NDArray[Any] | None = field(default=None, repr=False)  # the list of configurations scored last
    _table: tuple[npt.NDArray[Any], Tabled | None] | None = field(default=None, repr=False)

    @property
    def calibration(self) -> dict[str, Any] | None:
        return self.record.get("calibration")

    def score(self, kernel: Kernel, rows: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float32]:
        """One score per configuration, lower is faster."""
        with fitting(self.name):
            tabled = self._tabled(kernel) if rows is None else None
            if tabled is not None:
                return tabled.score(kernel)
            return self._score(self._prepared(kernel, rows))

    def contents(self) -> Contents:
        return file_contents(self.weights, self.preparation, self.schema, self.record)

    def save(self, path: str | Path) -> None:
        write_tensors(Path(path), *self.contents())

    def exact(self, kernel: Kernel, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The scores of a few configurations in float64."""
        with fitting(self.name):
            part = self._prepared(kernel, rows)
            wide = Prepared(part.node.astype(np.float64), part.opcode, part.edges, part.config.astype(np.float64))
            return np.asarray(self._score(wide), dtype=np.float64)

    def _tabled(self, kernel: Kernel) -> Tabled | None:
        """The kernel's configurations as a table, where the kernel before had the very same list."""
        config, features = kernel.config_feat, self.preparation
        if self._table is not None and self._table[0] is config:
            return self._table[1]
        seen, self._seen = self._seen, config
        if seen is not config or not isinstance(features, RankerFeatures) or config.dtype != np.float32:
            return None
        fits = config.shape[1] == len(features.config_low)
        made = Tabled.of(features, self._folded_for(config.dtype), config) if fits else None
        self._table = (config, made)
        return made

    def _prepared(self, kernel: Kernel, rows: npt.NDArray[np.int64] | None) -> Prepared:
        """The kernel's features; those of the last kernel scored whole are kept, for the settling of close scores."""
        last = self._last
        if last is None or last[0] is not kernel:
            if rows is not None:
                return self.preparation.apply(kernel, rows)
            last = self._last = (kernel, self.preparation.apply(kernel))
        whole = last[1]
        return whole if rows is None else whole.with_config(whole.config[rows])

    def _score(self, part: Prepared) -> npt.NDArray[Any]:
        """In the number type of the features."""
        if self.name == "TileRanker":
            folded = self._folded_for(part.config.dtype)
            return ranker.score_rows(folded, ranker.encode(folded, part), part.config)
        weights = self.weights
        if part.config.dtype != np.float32:
            weights = {name: array.astype(part.config.dtype) for name, array in weights.items()}
        if self.name == ridge.NAME:
            return ridge.score_ridge(weights, part.config)
        chunk = baselines.chunk_size(self.name, self.kwargs, part)
        pieces = []
        for start in range(0, len(part.config), chunk):
            piece = part.with_config(part.config[start : start + chunk])
            pieces.append(baselines.forward(self.name, weights, self.kwargs, piece))
        return np.concatenate(pieces)

    def _folded_for(self, dtype: np.dtype[Any]) -> ranker.Folded:
        if dtype.name not in self._folded:
            weights = {name: array.astype(dtype, copy=False) for name, array in self.weights.items()}
            self._folded[dtype.name] = ranker.fold(weights, self.kwargs)
        return self._folded[dtype.name]


def ridge_scorer(kernels: Sequence[Kernel], schema: Schema, seed: int = 0) -> Scorer:
    """The CPU's model (see `ridge`), fitted to kernels with runtimes."""
    weights, features = ridge.fit_ridge(kernels, schema, seed)
    return Scorer(ridge.NAME, weights, {}, features, schema, {"model": ridge.NAME, "seed": seed})


def load_scorer(path: str | Path) -> Scorer | GBDT | Blend:
    """The scorer in a model file, or in the folder of a training run.

    >>> load_scorer("model.safetensors").score(kernel).argmin()  # doctest: +SKIP
    17
    """
    file = read_model_file(path)
    if file.record["model"] == BLEND:
        return restore_blend(path, lambda part: restore_scorer(part, path))
    return restore_scorer(file, path)


def restore_scorer(file: ModelFile, path: str | Path) -> Scorer | GBDT:
    if file.record["model"] == "GBDT":
        return restore_gbdt(file)
    kwargs = file.record.get("model_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise FileFormatError(f"{path} does not say how its model is built; export it again.")
    return Scorer(file.record["model"], file.weights, kwargs, file.preparation, file.schema, file.record)
