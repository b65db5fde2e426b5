"""Confidence: a calibrated probability per kernel that the first choices contain a nearly optimal configuration.

Scores say which configuration is first, but not how close the others are. The statistic is the log-odds that the best
configuration is outside the first k, if scores are log-odds at the scale of the model's errors. A logistic curve with
two parameters (Platt scaling), fitted to the validation kernels, maps it to the probability that the first k contain a
configuration within 1 % of the best.

The claim "within 5 % (calibrated)" is made by the tuner, before or after measuring: see `tune.search`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.kernel import ranking

_MAX_LOGIT = 30.0


def outside_log_odds(scores: npt.NDArray[Any], k: int, scale: float) -> float:
    """Return the log-odds that the best is not among the k best-ranked, if scores have errors of size `scale`."""
    # Scores as log-odds: the softmax over all configurations in units of the model's error.
    ordered = -np.asarray(scores, dtype=np.float64)[ranking(scores)] / max(scale, 1e-9)
    # All configurations are inside.
    if len(ordered) <= k:
        return -_MAX_LOGIT
    inside, outside = np.logaddexp.reduce(ordered[:k]), np.logaddexp.reduce(ordered[k:])
    return float(np.clip(outside - inside, -_MAX_LOGIT, _MAX_LOGIT))


def confidence(scores: npt.NDArray[Any], calibration: Any, k: int = 5) -> float | None:
    """Return the probability that the k best-scored configurations contain one within 1 % of the best, or None."""
    # A calibration comes from a model file: an invalid one counts as none.
    try:
        level, slope = calibration[f"top{k}"]
        scale, level, slope = curve = float(calibration["scale"]), float(level), float(slope)
    except (TypeError, ValueError, LookupError, OverflowError):
        return None
    if not np.isfinite(curve).all():
        return None
    if len(scores) <= k:
        return 1.0
    return float(
        1 / (1 + np.exp(-np.clip(level + slope * outside_log_odds(scores, k, scale), -_MAX_LOGIT, _MAX_LOGIT)))
    )
