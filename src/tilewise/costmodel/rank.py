"""``rank(model, kernel)``: the configurations of a kernel from fastest to slowest, and how sure the top five is.

Works alike with a torch model, the NumPy scorer, trees, or the path of a model file, which is read without torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.confidence import confidence
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.metrics import ranking

_FLOAT32_NOISE = 2e-5  # of the largest score: several times what sums over a large graph lose


class Model(Protocol):
    """Anything that scores configurations, lower is faster."""

    @property
    def calibration(self) -> dict[str, Any] | None: ...
    def score(self, kernel: Kernel) -> npt.NDArray[np.float32]: ...


@dataclass(frozen=True, eq=False)
class Ranking:
    """`order[0]` is the configuration to try first; `scores` are in the order of the configurations."""

    order: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]
    sure_top1: float | None  # probability that the first is within one per cent of the best
    sure_top5: float | None  # probability that one of the first five is

    def top(self, k: int) -> list[int]:
        return [int(index) for index in self.order[:k]]


def rank(model: Model | str | os.PathLike[str], kernel: Kernel) -> Ranking:
    """Rank all configurations of a kernel.

    >>> rank("model.safetensors", kernel).top(5)  # doctest: +SKIP
    [17, 3, 240, 8, 99]
    """
    if isinstance(model, str | os.PathLike):
        from tilewise.costmodel.models.scorer import load_scorer

        return rank(load_scorer(Path(model)), kernel)
    scores, known = model.score(kernel), model.calibration
    order = _settled(model, kernel, scores)
    return Ranking(order, scores, confidence(scores, known, 1), confidence(scores, known, 5))


def _settled(model: Model, kernel: Kernel, scores: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """The order by score, where scores too close for float32 are worked out again in float64, rounded to 1e-9.

    Two configurations that the model cannot tell apart then keep their order, and two that it can are never swapped by
    rounding, so every implementation of a model (torch, NumPy, Keras) gives the same ranking.
    """
    order, exact = ranking(scores), getattr(model, "exact", None)
    if exact is None or not np.isfinite(scores).all():
        return order
    keys = scores.astype(np.float64)
    close = np.diff(keys[order]) <= _FLOAT32_NOISE * max(1.0, float(np.abs(keys).max()))
    doubtful = np.sort(order[np.append(close, False) | np.insert(close, 0, False)])
    settled = exact(kernel, doubtful) if len(doubtful) else None
    if settled is None:
        return order
    keys[doubtful] = settled
    return ranking(np.round(keys, 9))
