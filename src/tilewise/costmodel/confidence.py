"""How sure is the top five: a calibrated probability per kernel.

Scores alone say which configuration is first, not whether the field behind it is close. The statistic here is the share
of probability that falls outside the first k when scores are read as log-odds at the scale of the model's own
errors; a two-number logistic curve, fitted on the validation kernels, turns it into the probability that the first k
hold a configuration within one per cent of the best.

A probability near one half is of little use to somebody who must decide whether to measure. So there is also a plain
yes: "sure within five per cent". It is said of kernels whose statistic is below a bound, the highest at which the
claim was true of a share of the validation kernels. Such a bound flatters itself, so the share asked for, and the
multiple of the scale at which the statistic is taken, are chosen by judging each fifth of these kernels by the bound of
the others: of those pairs that are right 95 times in 100 there, the one that is said most often. Where there is none,
it is never said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.metrics import ranking, top_k_error

WITHIN = 0.01
SURE_WITHIN, SURE_RIGHT = 0.05, 0.95
_LEAST_SURE = 20  # validation kernels that the claim must have been tried on
_MULTIPLES, _SHARES, _FOLDS, _REPEATS = (1.0, 2.0, 4.0, 8.0), (0.95, 0.96, 0.97, 0.98, 0.99), 5, 20
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
        close = np.array([top_k_error(t, s, k) <= SURE_WITHIN for t, s in zip(targets, scores, strict=True)])
        fitted[f"sure{k}_multiple"], fitted[f"sure{k}"] = _surest(scores, close, k, scale)
    return fitted


def _surest(
    scores: Sequence[npt.NDArray[Any]], close: npt.NDArray[np.bool_], k: int, scale: float
) -> tuple[float, float | None]:
    """The multiple of the scale and the bound; None where no claim would be right often enough."""
    best: tuple[float, float, float | None] = (0.0, 1.0, None)
    for multiple in _MULTIPLES:
        statistic = np.array([outside_share(s, k, multiple * scale) for s in scores])
        for share in _SHARES:
            said, right = _apart(statistic, close, share)
            if said > best[0] and right >= SURE_RIGHT * said:
                best = (said, multiple, _bound(statistic, close, share))
    return best[1], best[2]


def _apart(statistic: npt.NDArray[np.float64], close: npt.NDArray[np.bool_], share: float) -> tuple[float, float]:
    """How often the claim is made, and rightly, by bounds that were fitted to other kernels."""
    rng, said, right = np.random.default_rng(0), 0, 0
    for _ in range(_REPEATS):
        fold = rng.permutation(len(close)) % _FOLDS
        for part in range(_FOLDS):
            bound = _bound(statistic[fold != part], close[fold != part], share)
            claimed = (fold == part) & (statistic <= (-np.inf if bound is None else bound))
            said, right = said + int(claimed.sum()), right + int((claimed & close).sum())
    return said, right


def _bound(statistic: npt.NDArray[np.float64], close: npt.NDArray[np.bool_], share: float) -> float | None:
    """The highest value at or below which that share of the claims was right; None where there is none."""
    order = np.argsort(statistic, kind="stable")
    held = np.arange(1, len(order) + 1)
    right = np.cumsum(close[order]) / held
    last = np.append(np.diff(statistic[order]) > 0, True)  # a bound lets in all of those that tie
    enough = np.flatnonzero((right >= share) & (held >= _LEAST_SURE) & last)
    return float(statistic[order[enough[-1]]]) if len(enough) else None


def sure_within(scores: npt.NDArray[Any], calibration: dict[str, Any] | None, k: int = 1) -> bool | None:
    """Whether to say that one of the first k is within five per cent of the best; None if uncalibrated."""
    curve = _curve(calibration, k)
    if curve is None or calibration is None or f"sure{k}" not in calibration:
        return None
    if len(scores) <= k:
        return True
    bound, multiple = calibration[f"sure{k}"], calibration.get(f"sure{k}_multiple", 1.0)
    if not isinstance(bound, int | float) or not isinstance(multiple, int | float):
        return False
    return outside_share(scores, k, multiple * curve[0]) <= bound


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
