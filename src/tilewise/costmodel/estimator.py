"""A cost model with scikit-learn's manners: `TileRanker().fit(kernels).predict(kernels)`.

The same training as `train(...)`, for people whose tools expect `fit`, `predict`, `score` and `get_params`. A sample is
a measured kernel with all of its configurations; a prediction is one array of scores for each kernel, lower is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.dataset import dataset_from_kernels
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import Schema
from tilewise.costmodel.metrics import top_k_error
from tilewise.costmodel.models.gbdt import GBDT
from tilewise.costmodel.models.trained import TrainedModel
from tilewise.costmodel.train.config import default_settings
from tilewise.errors import ConfigurationError


class TileRanker:
    """Ranks the tile configurations of kernels.

    `settings` are those of `train`: epochs, learning_rate, model_kwargs and so on. Every tenth kernel chooses the
    checkpoint and teaches nothing, unless `fit` is given kernels of its own for that.

    >>> from tilewise.costmodel import load_dataset
    >>> data = load_dataset("h200")  # doctest: +SKIP
    >>> ranker = TileRanker(epochs=10).fit(list(data.train), schema=data.schema)  # doctest: +SKIP
    >>> ranker.predict([data.test[0]])[0].argmin()  # doctest: +SKIP
    42
    """

    def __init__(self, model: str = "TileRanker", *, seed: int = 0, **settings: Any) -> None:
        default_settings(model, seed=seed, **settings)  # a mistake is said here, not after the data were read
        self.model, self.seed, self.settings = model, seed, settings
        self.fitted: TrainedModel | GBDT | None = None

    def fit(
        self, kernels: Sequence[Kernel], validation: Sequence[Kernel] | None = None, schema: Schema | None = None
    ) -> Self:
        """Train on measured kernels; `schema` names their columns where they are not TpuGraphs' own."""
        from tilewise.costmodel.train.loop import train

        kernels = _kernels(kernels)
        if len(kernels) < 2:
            raise ConfigurationError(f"fit needs at least two measured kernels, not {len(kernels)}.")
        chosen = _kernels(validation) if validation is not None else kernels[::10]
        taught = kernels if validation is not None else [k for i, k in enumerate(kernels) if i % 10]
        settings = default_settings(self.model, seed=self.seed, **self.settings)
        self.fitted = train(dataset_from_kernels(taught, chosen, schema=schema), settings, progress=False)
        return self

    def predict(self, kernels: Sequence[Kernel]) -> list[npt.NDArray[Any]]:
        """A score for each configuration of each kernel; lower is faster."""
        if self.fitted is None:
            raise ConfigurationError("call fit first: this TileRanker has learned nothing yet.")
        return [np.asarray(self.fitted.score(kernel)) for kernel in _kernels(kernels)]

    def score(self, kernels: Sequence[Kernel], k: int = 5) -> float:
        """1 minus the mean top-k error, as TpuGraphs scores tiles; higher is better."""
        kernels = list(kernels)
        scored = zip(kernels, self.predict(kernels), strict=True)
        return 1.0 - float(np.mean([top_k_error(kernel.target, scores, k) for kernel, scores in scored]))

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        return {"model": self.model, "seed": self.seed, **self.settings}

    def set_params(self, **params: Any) -> Self:
        known = self.get_params() | params
        self.model, self.seed = known.pop("model"), known.pop("seed")
        self.settings, self.fitted = known, None
        return self


def _kernels(samples: Sequence[Kernel]) -> list[Kernel]:
    """The samples, if each is a kernel: rows of numbers, as other estimators take them, are not."""
    kernels = list(samples)
    other = next((sample for sample in kernels if not isinstance(sample, Kernel)), None)
    if other is not None:
        raise ConfigurationError(
            f"a sample is a measured Kernel, as load_dataset gives them, not {type(other).__name__}."
        )
    return kernels
