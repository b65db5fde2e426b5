"""A cost model with scikit-learn's interface: `TileRanker().fit(kernels).predict(kernels)`.

It trains like `train(...)`, for tools that expect `fit`, `predict`, `score` and `get_params`. A sample is a measured
kernel with all of its configurations; a prediction is one array of scores per kernel, lower is faster.
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
from tilewise.costmodel.training.config import default_settings
from tilewise.errors import ConfigurationError

_HOLD_OUT_STEP = 10  # every tenth kernel is held out for validation


class TileRanker:
    """Ranks the tile configurations of kernels.

    `settings` are those of `train`: epochs, learning_rate, model_kwargs and so on. Every tenth kernel is held out to
    choose the checkpoint, unless `fit` receives validation kernels.

    >>> from tilewise.costmodel import load_dataset
    >>> data = load_dataset("h200")  # doctest: +SKIP
    >>> ranker = TileRanker(epochs=10).fit(list(data.train), schema=data.schema)  # doctest: +SKIP
    >>> ranker.predict([data.test[0]])[0].argmin()  # doctest: +SKIP
    42
    """

    def __init__(self, model: str = "TileRanker", *, seed: int = 0, **settings: Any) -> None:
        default_settings(model, seed=seed, **settings)  # reports a wrong setting before any data is read
        self.model, self.seed, self.settings = model, seed, settings
        self.fitted: TrainedModel | GBDT | None = None

    def fit(
        self, kernels: Sequence[Kernel], validation: Sequence[Kernel] | None = None, schema: Schema | None = None
    ) -> Self:
        """Train on measured kernels; `schema` names their columns if they are not those of TpuGraphs."""
        from tilewise.costmodel.training.loop import train

        kernels = _checked_kernels(kernels)
        # One kernel to train on and one to choose the checkpoint.
        if len(kernels) < 2:
            raise ConfigurationError(f"fit needs at least two measured kernels, not {len(kernels)}.")
        # Hold out every tenth kernel if there are no validation kernels.
        valid = _checked_kernels(validation) if validation is not None else kernels[::_HOLD_OUT_STEP]
        train_kernels = kernels if validation is not None else [k for i, k in enumerate(kernels) if i % _HOLD_OUT_STEP]
        settings = default_settings(self.model, seed=self.seed, **self.settings)
        self.fitted = train(dataset_from_kernels(train_kernels, valid, schema=schema), settings, progress=False)
        return self

    def predict(self, kernels: Sequence[Kernel]) -> list[npt.NDArray[Any]]:
        """Return a score for each configuration of each kernel; lower is faster."""
        if self.fitted is None:
            raise ConfigurationError("this TileRanker is not trained yet; call fit first.")
        return [np.asarray(self.fitted.score(kernel)) for kernel in _checked_kernels(kernels)]

    def score(self, kernels: Sequence[Kernel], k: int = 5) -> float:
        """Return 1 minus the mean top-k error, the tile score of TpuGraphs; higher is better."""
        kernels = list(kernels)
        scored = zip(kernels, self.predict(kernels), strict=True)
        return 1.0 - float(np.mean([top_k_error(kernel.target, scores, k) for kernel, scores in scored]))

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters of the constructor."""
        return {"model": self.model, "seed": self.seed, **self.settings}

    def set_params(self, **params: Any) -> Self:
        """Change parameters; the model must then be fitted again."""
        settings = self.get_params() | params
        self.model, self.seed = settings.pop("model"), settings.pop("seed")
        self.settings, self.fitted = settings, None
        return self


def _checked_kernels(samples: Sequence[Kernel]) -> list[Kernel]:
    """Return the samples as a list; raise if one is not a `Kernel` (for example a row of numbers)."""
    kernels = list(samples)
    other = next((sample for sample in kernels if not isinstance(sample, Kernel)), None)
    if other is not None:
        raise ConfigurationError(
            f"a sample must be a measured Kernel, as load_dataset returns them, not {type(other).__name__}."
        )
    return kernels
