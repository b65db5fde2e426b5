"""``rank(model, kernel)``: order the configurations of a kernel from fastest to slowest, with confidences.

The model can be a torch model, the NumPy scorer, trees, or the path of a model file, which is read without torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.confidence import confidence
from tilewise.costmodel.data.kernel import Kernel, ranking
from tilewise.errors import ConfigurationError, type_name

_FLOAT32_NOISE = 2e-5  # relative to the largest score; several times the rounding of sums over a large graph


class Model(Protocol):
    """Anything that scores configurations; lower is faster."""

    @property
    def calibration(self) -> dict[str, Any] | None: ...
    def score(self, kernel: Kernel) -> npt.NDArray[np.float32]: ...


@dataclass(frozen=True, eq=False)
class Ranking:
    """Result of `rank`: `order[0]` is the configuration to try first; `scores` are in the configurations' order."""

    order: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]
    confidence_top1: float | None  # probability that the first is within 1 % of the best
    confidence_top5: float | None  # probability that one of the first five is

    def top(self, k: int) -> list[int]:
        """Return the first k configurations."""
        return [int(index) for index in self.order[:k]]


def rank(model: Model | str | os.PathLike[str], kernel: Kernel) -> Ranking:
    """Rank all configurations of a kernel.

    >>> rank("model.safetensors", kernel).top(5)  # doctest: +SKIP
    [17, 3, 240, 8, 99]
    """
    if isinstance(model, str | os.PathLike):
        from tilewise.costmodel.models.scorer import load_scorer

        return rank(load_scorer(Path(model)), kernel)
    if not hasattr(model, "score"):
        raise ConfigurationError(f"rank takes a trained cost model or its file, not a {type_name(model)}")
    scores, calibration = model.score(kernel), model.calibration
    # A calibration says nothing about kernels unlike those that it was fitted to.
    if hasattr(model, "unfamiliarity") and model.unfamiliarity(kernel):
        calibration = None
    order = _reproducible_order(model, kernel, scores)
    return Ranking(order, scores, confidence(scores, calibration, 1), confidence(scores, calibration, 5))


def _reproducible_order(model: Model, kernel: Kernel, scores: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Order configurations by score; those too close for float32 are scored again in float64, rounded to 1e-9.

    Configurations that the model cannot distinguish then keep their order, and those that it can are never swapped by
    rounding, so that every implementation of a model (torch, NumPy, Keras) gives the same ranking.
    """
    order, exact = ranking(scores), getattr(model, "exact", None)
    # Models without a float64 path keep their float32 order.
    if exact is None or not np.isfinite(scores).all():
        return order
    # Find scores closer to a neighbour in the order than float32 rounding.
    keys = scores.astype(np.float64)
    close = np.diff(keys[order]) <= _FLOAT32_NOISE * max(1.0, float(np.abs(keys).max()))
    doubtful = np.sort(order[np.append(close, False) | np.insert(close, 0, False)])
    exact_scores = exact(kernel, doubtful) if len(doubtful) else None
    if exact_scores is None:
        return order
    keys[doubtful] = exact_scores
    return ranking(np.round(keys, 9))
