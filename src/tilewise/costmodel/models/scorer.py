"""The torch-free scorer: the tuner and the dispatcher load it to score a kernel's configurations with NumPy.

It reads the files that training writes. Configurations are scored in chunks and independently of each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import Schema
from tilewise.costmodel.features.inputs import ModelInputs, Preparation
from tilewise.costmodel.models.files import BLEND, ModelFile, read_model_file, report_misfit, shipped_file
from tilewise.costmodel.models.numpy import ranker
from tilewise.errors import FileFormatError

if TYPE_CHECKING:
    from tilewise.costmodel.models.blend import Blend
    from tilewise.costmodel.models.file_writer import FileContents
    from tilewise.costmodel.models.gbdt import GBDT

RIDGE = "CpuRidge"  # name of the CPU model in files; see `ridge`


@dataclass(eq=False)
class Scorer:
    """A trained model in NumPy; it implements `ranking.Model`."""

    name: str
    weights: dict[str, npt.NDArray[Any]]
    kwargs: dict[str, Any]
    preparation: Preparation
    schema: Schema
    record: dict[str, Any]
    _folded: dict[str, ranker.FoldedWeights] = field(default_factory=dict, repr=False)  # by precision

    @property
    def calibration(self) -> dict[str, Any] | None:
        return self.record.get("calibration")

    def score(self, kernel: Kernel, rows: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float32]:
        """Return one score per configuration, or per configuration in `rows`; lower is faster."""
        with report_misfit(self.name):
            return self._score(self.preparation.apply(kernel, rows))

    def contents(self) -> FileContents:
        """Return the tensors and metadata of the model file."""
        from tilewise.costmodel.models.file_writer import file_contents

        return file_contents(self.weights, self.preparation, self.schema, self.record)

    def save(self, path: str | Path) -> None:
        """Write the model file, which `load_scorer` reads."""
        from tilewise.costmodel.models.file_writer import write_tensors

        write_tensors(Path(path), *self.contents())

    def exact(self, kernel: Kernel, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Score the configurations `rows` in float64, to order those whose float32 scores are too close."""
        with report_misfit(self.name):
            inputs = self.preparation.apply(kernel, rows)
            node: Any = inputs.node.astype(np.float64)
            config: Any = inputs.config.astype(np.float64)
            float64_inputs = ModelInputs(node, inputs.opcode, inputs.edges, config)
            return np.asarray(self._score(float64_inputs), dtype=np.float64)

    def _score(self, inputs: ModelInputs) -> npt.NDArray[Any]:
        """Score all configurations of the inputs, in the inputs' dtype."""
        if self.name == "TileRanker":
            folded = self._folded_for(inputs.config.dtype)
            return ranker.score_rows(folded, ranker.encode(folded, inputs), inputs.config)
        # The other models have no folded weights; they run on plain arrays of the same precision.
        weights = self.weights
        if inputs.config.dtype != np.float32:
            weights = {name: array.astype(inputs.config.dtype) for name, array in weights.items()}
        if self.name == RIDGE:
            from tilewise.costmodel.models.ridge import score_ridge

            return score_ridge(weights, inputs.config)
        from tilewise.costmodel.models.numpy import baselines

        return baselines.score(self.name, weights, self.kwargs, inputs)

    def _folded_for(self, dtype: np.dtype[Any]) -> ranker.FoldedWeights:
        """Return the weights, rearranged for scoring, in a dtype; cached."""
        if dtype.name not in self._folded:
            weights = {name: array.astype(dtype, copy=False) for name, array in self.weights.items()}
            self._folded[dtype.name] = ranker.fold(weights, self.kwargs)
        return self._folded[dtype.name]


def load_scorer(path: str | Path) -> Scorer | GBDT | Blend:
    """Load the scorer from a model file or from the folder of a training run.

    >>> load_scorer("model.safetensors").score(kernel).argmin()  # doctest: +SKIP
    17
    """
    file = read_model_file(path)
    if file.record["model"] == BLEND:
        from tilewise.costmodel.models.blend import restore_blend

        return restore_blend(path, lambda member: restore_scorer(member, path))
    return restore_scorer(file, path)


def restore_scorer(file: ModelFile, path: str | Path) -> Scorer | GBDT:
    """Build the scorer of a single model from its validated file; `path` is named in errors."""
    if file.record["model"] == "GBDT":
        from tilewise.costmodel.models.gbdt import restore_gbdt

        return restore_gbdt(file)
    kwargs = file.record.get("model_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise FileFormatError(f"{path} does not record the arguments of its model; export it again.")
    return Scorer(file.record["model"], file.weights, kwargs, file.preparation, file.schema, file.record)


def shipped_scorer(collection: str) -> Scorer | GBDT | Blend:
    """Load the shipped model of a collection, such as "h200"."""
    return load_scorer(shipped_file(collection))
