"""The learned cost model: trained on measured kernels, it ranks tile configurations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilewise.costmodel.data.dataset import Dataset, load_dataset
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.evaluate import Evaluation, evaluate
from tilewise.costmodel.hlo.featurize import featurize_hlo
from tilewise.costmodel.models.gbdt import GBDT
from tilewise.costmodel.models.scorer import Scorer, load_scorer
from tilewise.costmodel.models.trained import TrainedModel, load_model
from tilewise.costmodel.rank import Ranking, rank
from tilewise.costmodel.train.loop import train

if TYPE_CHECKING:
    from tilewise.costmodel.estimator import TileRanker
    from tilewise.costmodel.models.torch import build_model

__all__ = [
    "GBDT",
    "Dataset",
    "Evaluation",
    "Kernel",
    "Ranking",
    "Scorer",
    "TileRanker",
    "TrainedModel",
    "build_model",
    "evaluate",
    "featurize_hlo",
    "load_dataset",
    "load_model",
    "load_scorer",
    "rank",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import `build_model`, which needs torch, and `TileRanker` on first use."""
    if name == "build_model":
        from tilewise.costmodel.models.torch import build_model

        return build_model
    if name == "TileRanker":
        from tilewise.costmodel.estimator import TileRanker

        return TileRanker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
