"""Confidence: a calibrated probability per kernel that the first choices contain a nearly optimal configuration.

Scores say which configuration is first, but not how close the others are. The statistic is the log-odds that the best
configuration is outside the first k, if scores are log-odds at the scale of the model's errors. A logistic curve with
two parameters (Platt scaling), fitted to the validation kernels, maps it to the probability that the first k contain a
configuration within 1 % of the best.

The claim "within 5 % (calibrated)" is made by the tuner, before or after measuring: see `tune.search`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.kernel import Kernel, ranking

WITHIN = 0.01  # relative slowdown that counts as nearly optimal
_KS = (1, 5)
_MIN_KERNELS = 5  # fewer are not enough to fit two parameters
_RIDGE = 1e-2  # weak L2 penalty of the logistic regression, for separable data
_MAX_LOGIT = 30.0
_NEWTON_STEPS = 50


class ScoringModel(Protocol):
    """Anything that scores the configurations of a kernel."""

    def score(self, kernel: Kernel) -> npt.NDArray[np.float32]: ...


def outside_log_odds(scores: npt.NDArray[Any], k: int, scale: float) -> float:
    """Return the log-odds that the best is outside the first k, if the scores have errors of size `scale`."""
    # Scores as log-odds: the softmax over all configurations in units of the model's error.
    ordered = -np.asarray(scores, dtype=np.float64)[ranking(scores)] / max(scale, 1e-9)
    # All configurations are inside.
    if len(ordered) <= k:
        return -_MAX_LOGIT
    inside, outside = np.logaddexp.reduce(ordered[:k]), np.logaddexp.reduce(ordered[k:])
    return float(np.clip(outside - inside, -_MAX_LOGIT, _MAX_LOGIT))


def calibrate(model: ScoringModel, kernels: Sequence[Kernel]) -> dict[str, Any] | None:
    """Fit the calibration that is stored with a model; None if there are too few kernels."""
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


def confidence(scores: npt.NDArray[Any], calibration: dict[str, Any] | None, k: int = 5) -> float | None:
    """Return the probability that the first k contain one within 1 % of the best; None without a calibration."""
    curve = _logistic_curve(calibration, k)
    if curve is None:
        return None
    scale, level, slope = curve
    if len(scores) <= k:
        return 1.0
    return float(
        1 / (1 + np.exp(-np.clip(level + slope * outside_log_odds(scores, k, scale), -_MAX_LOGIT, _MAX_LOGIT)))
    )


def _logistic_curve(calibration: Any, k: int) -> tuple[float, float, float] | None:
    """Read scale, level and slope from a model's record; None if it has no valid ones."""
    try:
        level, slope = calibration[f"top{k}"]
        curve = float(calibration["scale"]), float(level), float(slope)
    except (TypeError, ValueError, LookupError, OverflowError):
        return None
    return curve if np.isfinite(curve).all() else None


def _error_scale(scores: Sequence[npt.NDArray[Any]], targets: Sequence[npt.NDArray[Any]]) -> float:
    """Return the median over kernels of the scores' residual deviation around log runtime, among the leaders."""
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
    """Fit level and slope by Newton's method, with a weak ridge and half a success and half a failure added."""
    # The added half success and half failure keep the fit finite if all kernels agree.
    x = np.concatenate([x, [x.mean(), x.mean()]])
    design = np.stack([np.ones_like(x), x], axis=1)
    labels, weight = np.concatenate([y.astype(float), [1.0, 0.0]]), np.concatenate([np.ones(len(y)), [0.5, 0.5]])
    beta = np.zeros(2)
    for _ in range(_NEWTON_STEPS):
        p = 1 / (1 + np.exp(-np.clip(design @ beta, -_MAX_LOGIT, _MAX_LOGIT)))
        gradient = design.T @ (weight * (labels - p)) - _RIDGE * beta
        curvature = (design * (weight * p * (1 - p))[:, None]).T @ design + (_RIDGE + 1e-9) * np.eye(2)
        # Bounded steps keep Newton's method from overshooting on nearly separable data.
        beta = beta + np.clip(np.linalg.solve(curvature, gradient), -5, 5)
    return [float(beta[0]), float(min(beta[1], 0.0))]  # more probability outside never raises the confidence
