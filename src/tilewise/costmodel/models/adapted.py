"""Adaptation of a model to another device with a few measurements from it.

`adapt` adds boosted trees to a model. They read the model's inputs and are fitted to the residual of the measured log
runtimes, with larger weights for fast configurations. The result is a blend of model and trees (see `blend`). In a
five-fold cross-validation over kernels, the trees must not make the first choices slower by more than one standard
error; otherwise the model is returned unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.models.blend import Blend
from tilewise.costmodel.models.files import BLEND
from tilewise.costmodel.models.gbdt import GBDT, fit_trees, tabular
from tilewise.costmodel.models.scorer import Scorer, load_scorer
from tilewise.errors import ConfigurationError

Floats = npt.NDArray[np.float64]
Base = Scorer | GBDT | Blend

MIN_MEASUREMENTS = 5
_TREE_SETTINGS: dict[str, Any] = {
    "learning_rate": 0.05,
    "num_leaves": 15,
    "min_data_in_leaf": 10,
    "feature_fraction": 0.5,
    "lambda_l2": 5.0,
}
_TREE_COUNT = 150
_SHARPNESS = 4.0  # a configuration has the weight exp(-_SHARPNESS * (log runtime above the kernel's best))
_FOLDS = 5
_CHOICES = 5  # first choices that the cross-validation compares


def adapt(base: str | Path, kernels: Sequence[Kernel]) -> Base:
    """Load the model in file `base` and adapt it to the measurements in `kernels`.

    Returns the model unchanged if cross-validation shows no improvement.
    """
    model = load_scorer(base)
    if model.record.get("adapted") is not None:
        raise ConfigurationError(f"{base} is adapted already; give the model that it was adapted from.")
    return adapt_model(model, kernels)


def adapt_model(model: Base, kernels: Sequence[Kernel]) -> Base:
    """Adapt a loaded model as `adapt` does; its record's entry `adapted` has the cross-validation."""
    # A kernel with one configuration says nothing about an order.
    labelled = [kernel for kernel in kernels if kernel.labelled and kernel.n_configs > 1]
    count = sum(kernel.n_configs for kernel in labelled)
    if count < MIN_MEASUREMENTS:
        raise ConfigurationError(
            f"Adapting needs {MIN_MEASUREMENTS} measured configurations at least; there are {count}."
        )
    measurements = [_Measurements.from_kernel(model, kernel) for kernel in labelled]
    # Decide by cross-validation whether the correction helps on kernels that it was not fitted to.
    base_error, adapted_error, worse = _cross_validate(measurements)
    summary: dict[str, Any] = {"measurements": count, "kernels": len(labelled)}
    summary |= {"left_out": {"base": base_error, "adapted": adapted_error}, "kept": not worse}
    record: dict[str, Any] = {"calibration": None, "adapted": summary}
    if worse:
        unchanged = copy.copy(model)
        unchanged.record = model.record | record
        return unchanged
    # Fit again with all measurements.
    slope, booster = _fit_correction(measurements)
    trees = GBDT(booster, model.preparation, model.schema, {"model": "GBDT", "ranks": False})
    # A blend stays flat: the trees become one more member.
    models, weights = (model.models, model.weights) if isinstance(model, Blend) else ([model], [1.0])
    return Blend([*models, trees], [*(slope * weight for weight in weights), 1.0], {"model": BLEND} | record)


@dataclass(frozen=True, eq=False)
class _Measurements:
    """Measurements of one kernel with M configurations."""

    table: npt.NDArray[np.float32]  # (M, inputs): the inputs of the trees
    scores: Floats  # (M,): the model's scores above the lowest
    logs: Floats  # (M,): log runtimes above the best
    weights: Floats  # (M,)

    @classmethod
    def from_kernel(cls, model: Base, kernel: Kernel) -> _Measurements:
        """Prepare features, scores, log runtimes and weights of a measured kernel."""
        # Scores and log runtimes are compared within a kernel, so both start at 0.
        logs = np.log(kernel.target.astype(np.float64) / float(kernel.target.min()))
        scores = np.asarray(model.score(kernel), dtype=np.float64)
        return cls(tabular(model.preparation, kernel), scores - scores.min(), logs, np.exp(-_SHARPNESS * logs))

    def subset(self, rows: npt.NDArray[np.int64]) -> _Measurements:
        return _Measurements(self.table[rows], self.scores[rows], self.logs[rows], self.weights[rows])

    def centred(self, values: Floats) -> Floats:
        """Subtract the weighted mean over the kernel's configurations."""
        return np.asarray(values - self.weights @ values / self.weights.sum())


def _fit_score_slope(measurements: Sequence[_Measurements]) -> float:
    """Fit the factor from scores to log runtime within kernels, by weighted least squares; 1 if scores are constant."""
    centred = [(m.centred(m.scores), m.centred(m.logs), m.weights) for m in measurements]
    covariance = sum(w @ (s * y) for s, y, w in centred)
    variance = sum(w @ (s * s) for s, _, w in centred)
    slope = float(covariance / variance) if variance > 1e-12 else 1.0
    return slope if slope > 1e-3 else 1e-3  # a blend's weights are positive


def _fit_correction(measurements: Sequence[_Measurements]) -> tuple[float, Any]:
    """Fit the factor from scores to log runtime, then boosted trees to the residuals; return both."""
    slope = _fit_score_slope(measurements)
    table, weights = (np.concatenate([getattr(m, name) for m in measurements]) for name in ("table", "weights"))
    residual = np.concatenate([m.logs - slope * m.scores for m in measurements])
    return slope, fit_trees(table, residual, _TREE_COUNT, _TREE_SETTINGS, weights)


def _cross_validate(measurements: Sequence[_Measurements]) -> tuple[float, float, bool]:
    """Compare the choices of the model and of its adaptation on held-out kernels.

    Returns both regrets (mean slowdown of the best of the first one to five choices) and whether to reject the adapted
    model: it is worse by more than a standard error, or never different. With fewer than three kernels, configurations
    are held out.
    """
    regrets = []
    for train, test in _cross_validation_folds(measurements):
        slope, booster = _fit_correction(train)
        for m in test:
            adapted_scores = slope * m.scores + booster.predict(m.table)
            regrets.append([_log_regret(m.logs, scores) for scores in (m.scores, adapted_scores)])
    base_error, adapted_error = np.expm1(np.mean(regrets, axis=0))
    # Paired difference, adapted minus base; positive means that adapting made the choices slower.
    increase = np.subtract(*np.transpose(regrets)[::-1])
    standard_error = float(increase.std(ddof=1)) / len(increase) ** 0.5 if len(increase) > 1 else 0.0
    worse = bool(increase.mean() > standard_error or not increase.any())
    return float(base_error), float(adapted_error), worse


def _log_regret(logs: Floats, scores: Floats) -> float:
    """Return the mean over k = 1 to 5 of log(best runtime among the first k choices / fastest runtime)."""
    best = np.minimum.accumulate(logs[np.argsort(scores, kind="stable")[:_CHOICES]])
    return float(best.mean() - logs.min())


def _cross_validation_folds(
    measurements: Sequence[_Measurements],
) -> list[tuple[list[_Measurements], list[_Measurements]]]:
    """Split into (train, test) folds for cross-validation, by kernel or, with fewer than three, by configuration."""
    rng = np.random.default_rng(0)
    # With one or two kernels, every kernel is in all folds with a part of its configurations.
    if len(measurements) < 3:
        count = max(2, min(_FOLDS, min(len(m.logs) for m in measurements) // 2))
        subsets = [
            [m.subset(rows) for rows in np.array_split(rng.permutation(len(m.logs)), count)] for m in measurements
        ]
        tests = [list(fold) for fold in zip(*subsets, strict=True)]
    else:
        order = np.array_split(rng.permutation(len(measurements)), min(_FOLDS, len(measurements)))
        tests = [[measurements[int(i)] for i in rows] for rows in order]
    trains = [[m for other in tests if other is not test for m in other] for test in tests]
    return list(zip(trains, tests, strict=True))
