"""The learned cost model: trained on measured kernels, it ranks tile configurations.

Names are imported on first use, so that ranking with a trained model loads neither training nor evaluation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewise._late import late_names

if TYPE_CHECKING:
    from tilewise.costmodel.data.dataset import Dataset, load_dataset
    from tilewise.costmodel.data.kernel import Kernel
    from tilewise.costmodel.estimator import TileRanker
    from tilewise.costmodel.evaluation import Evaluation, evaluate
    from tilewise.costmodel.hlo.featurize import featurize_hlo
    from tilewise.costmodel.models.gbdt import GBDT
    from tilewise.costmodel.models.scorer import Scorer, load_scorer
    from tilewise.costmodel.models.torch import build_model
    from tilewise.costmodel.models.trained import TrainedModel, load_model
    from tilewise.costmodel.ranking import Ranking, rank
    from tilewise.costmodel.training.loop import train

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

__getattr__ = late_names(
    __name__,
    {
        ".data.dataset": "Dataset load_dataset",
        ".data.kernel": "Kernel",
        ".estimator": "TileRanker",
        ".evaluation": "Evaluation evaluate",
        ".hlo.featurize": "featurize_hlo",
        ".models.gbdt": "GBDT",
        ".models.scorer": "Scorer load_scorer",
        ".models.torch": "build_model",
        ".models.trained": "TrainedModel load_model",
        ".ranking": "Ranking rank",
        ".training.loop": "train",
    },
)
