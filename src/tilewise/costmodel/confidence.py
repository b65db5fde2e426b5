"""How sure is the top five: a calibrated probability per kernel.

Scores alone say which configuration is first, not whether the field behind it is close. The statistic here is the share
of probability that falls outside the first k when scores are read as log-odds at the scale of the model's own
errors; a two-number logistic curve, fitted on the validation kernels, turns it into the probability that the first k
hold a configuration within one per cent of the best.

A plain yes, "sure within five per cent", is the tuner's to say, before or after measuring: see `tune.search.surety`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.metrics import ranking, top_k_error

WITHIN = 0.01
_KS = (1, 5)
_PRIOR = 1e-2


class Scores(Protocol):
    def score(self, kernel: Kernel) -> npt.NDArray[np.float32]: ...


def outside_share(scores: npt.NDArray[Any], k: int, scale: float) -> float:
    """log of the odds that the best is outside the first k, were each score an estimate with errors of `scale`."""
    ordered = -np.asarray(scores, dtype=np.float64)[ranking(scores)] / max(scale, 1e-9)
    if len(ordered) <= k:
        return -30.0
    inside, outside = np.logaddexp.reduce(ordered[:k]), np.logaddexp.reduce(ordered[k:])
    return float(np.clip(outside - inside, -30.0, 30.0))


def calibrate(model: Scores, kernels: Sequence[Kernel]) -> dict[str, Any] | None:
    """The calibration to store with a model; None when there are too few kernels to say anything."""
    labelled = [kernel for kernel in kernels if kernel.labelled]
    if len(labelled) < 5:
        return None
    scores = [model.score(kernel) for kernel in labelled]
    targets = [kernel.target for kernel in labelled]
    scale = _error_scale(scores, targets)
    fitted: dict[str, Any] = {"scale": scale, "within": WITHIN, "kernels": len(labelled)}
    for k in _KS:
        statistic = np.array([outside_share(s, k, scale) for s in scores])
        good = np.array([top_k_error(t, s, k) <= WITHIN for t, s in zip(targets, scores, strict=True)])
        fitted[f"top{k}"] = _logistic(statistic, good)
    return fitted


def confidence(scores: npt.NDArray[Any], calibration: dict[str, Any] | None, k: int = 5) -> float | None:
    """Probability that the first k hold a configuration within one per cent of the best; None if uncalibrated."""
    curve = _curve(calibration, k)
    if curve is None:
        return None
    scale, level, slope = curve
    if len(scores) <= k:
        return 1.0
    return float(1 / (1 + np.exp(-np.clip(level + slope * outside_share(scores, k, scale), -30, 30))))


def _curve(calibration: Any, k: int) -> tuple[float, float, float] | None:
    """Scale, level and slope; None where a model's record holds no such three numbers."""
    try:
        level, slope = calibration[f"top{k}"]
        curve = float(calibration["scale"]), float(level), float(slope)
    except (TypeError, ValueError, LookupError, OverflowError):
        return None
    return curve if np.isfinite(curve).all() else None


def _error_scale(scores: Sequence[npt.NDArray[Any]], targets: Sequence[npt.NDArray[Any]]) -> float:
    """Median over kernels of the spread of scores that a runtime ratio of e among the leaders corresponds to."""
    spreads = []
    for s, t in zip(scores, targets, strict=True):
        leaders = ranking(s)[: max(10, len(s) // 10)]
        logs, own = np.log(t[leaders]), np.asarray(s, dtype=np.float64)[leaders]
        slope = np.polyfit(logs, own, 1)[0] if len(leaders) > 2 and np.ptp(logs) > 1e-9 else 0.0
        spreads.append(float(np.std((own - own.mean()) - slope * (logs - logs.mean()))))
    return float(np.median(spreads)) or 1e-6


def _logistic(x: npt.NDArray[np.float64], y: npt.NDArray[np.bool_]) -> list[float]:
    """Level and slope by Newton's method, with a weak pull to zero and half a success and failure added."""
    x = np.concatenate([x, [x.mean(), x.mean()]])
    design = np.stack([np.ones_like(x), x], axis=1)
    goal, weight = np.concatenate([y.astype(float), [1.0, 0.0]]), np.concatenate([np.ones(len(y)), [0.5, 0.5]])
    beta = np.zeros(2)
    for _ in range(50):
        p = 1 / (1 + np.exp(-np.clip(design @ beta, -30, 30)))
        gradient = design.T @ (weight * (goal - p)) - _PRIOR * beta
        curvature = (design * (weight * p * (1 - p))[:, None]).T @ design + (_PRIOR + 1e-9) * np.eye(2)
        beta = beta + np.clip(np.linalg.solve(curvature, gradient), -5, 5)
    return [float(beta[0]), float(min(beta[1], 0.0))]  # a closer field never makes it surer
