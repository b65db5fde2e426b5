"""Fit the calibration of a model's confidence (`confidence.py`) to labelled kernels, by logistic regression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.confidence import _MAX_LOGIT, outside_log_odds
from tilewise.costmodel.data.kernel import Kernel, ranking

WITHIN = 0.01  # relative slowdown that counts as nearly optimal
_KS = (1, 5)
_MIN_KERNELS = 5  # fewer are not enough to fit two parameters
_RIDGE = 0.1  # L2 penalty of the logistic regression; 0.01 was too sure with eight kernels
_NEWTON_STEPS = 50


def calibrate(model: Any, kernels: Sequence[Kernel]) -> dict[str, Any] | None:
    """Fit the calibration of a model's confidence on held-out kernels; None if there are too few."""
    from tilewise.costmodel.metrics import top_k_error

    labelled = [kernel for kernel in kernels if kernel.labelled]
    if len(labelled) < _MIN_KERNELS:
        return None
    scores = [model.score(kernel) for kernel in labelled]
    targets = [kernel.target for kernel in labelled]
    scale = _error_scale(scores, targets)
    calibration: dict[str, Any] = {"scale": scale, "within": WITHIN, "kernels": len(labelled)}
    for k in _KS:
        statistic = np.array([outside_log_odds(s, k, scale) for s in scores])
        good = np.array([top_k_error(t, s, k) <= WITHIN for t, s in zip(targets, scores, strict=True)])
        calibration[f"top{k}"] = _fit_logistic(statistic, good)
    return calibration


def _error_scale(scores: Sequence[npt.NDArray[Any]], targets: Sequence[npt.NDArray[Any]]) -> float:
    """Return the typical error of the scores: the median, over kernels, of their deviation from a line in log runtime.

    Only each kernel's best-ranked configurations count, because the slow ones have larger errors.
    """
    deviations = []
    for s, t in zip(scores, targets, strict=True):
        # Only the leaders matter; the slow tail has larger errors.
        leaders = ranking(s)[: max(10, len(s) // 10)]
        logs, leader_scores = np.log(t[leaders]), np.asarray(s, dtype=np.float64)[leaders]
        slope = np.polyfit(logs, leader_scores, 1)[0] if len(leaders) > 2 and np.ptp(logs) > 1e-9 else 0.0
        residual = (leader_scores - leader_scores.mean()) - slope * (logs - logs.mean())
        deviations.append(float(np.std(residual)))
    return float(np.median(deviations)) or 1e-6


def _fit_logistic(x: npt.NDArray[np.float64], y: npt.NDArray[np.bool_]) -> list[float]:
    """Fit P(y) = sigmoid(level + slope · x) by Newton's method; return [level, slope].

    A success and a failure are added (Platt 1999), because a few kernels that agree do not make a probability 0 or 1.
    """
    x = np.concatenate([x, [x.mean(), x.mean()]])
    design = np.stack([np.ones_like(x), x], axis=1)
    labels = np.concatenate([y.astype(float), [1.0, 0.0]])
    beta = np.zeros(2)
    for _ in range(_NEWTON_STEPS):
        p = 1 / (1 + np.exp(-np.clip(design @ beta, -_MAX_LOGIT, _MAX_LOGIT)))
        gradient = design.T @ (labels - p) - _RIDGE * beta
        curvature = (design * (p * (1 - p))[:, None]).T @ design + (_RIDGE + 1e-9) * np.eye(2)
        # Bounded steps keep Newton's method from overshooting on nearly separable data.
        beta = beta + np.clip(np.linalg.solve(curvature, gradient), -5, 5)
    return [float(beta[0]), float(min(beta[1], 0.0))]  # more probability outside never raises the confidence
