"""How good a ranking of configurations is: top-K error, tile score, ordered pair accuracy, Kendall's tau.

Everything takes one kernel's normalised runtimes and scores where lower means faster. Pairs are counted exactly in
O(n log n), ties included: the pairs in wrong order are the inversions of one sequence, counted bit by bit. Scores that
tie are ranked in the order of the configurations, so a result never depends on the sorting algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import ShapeError
from tilewise.profile.timing.statistics import resampled_means

Floats = npt.NDArray[np.floating[Any]]


def ranking(scores: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Configuration numbers from the fastest predicted to the slowest."""
    return np.argsort(np.asarray(scores), kind="stable").astype(np.int64)


def top_k_error(target: npt.ArrayLike, scores: npt.ArrayLike, k: int) -> float:
    """How much slower the best of the first `k` is than the best of all: 0 is perfect, 0.1 is ten per cent."""
    t, s = _pair(target, scores)
    return float(t[ranking(s)[:k]].min() / t.min() - 1.0)


def tile_score(targets: Sequence[npt.ArrayLike], scores: Sequence[npt.ArrayLike]) -> float:
    """Kaggle's score: the mean over kernels of one minus the top-5 error."""
    return float(np.mean([1.0 - top_k_error(t, s, 5) for t, s in zip(targets, scores, strict=True)]))


@dataclass(frozen=True)
class PairCounts:
    """How the pairs of configurations fall: in the true order, in the reverse one, or tied on one side or both."""

    pairs: int
    concordant: int
    discordant: int
    tied_target: int
    tied_scores: int


def count_pairs(target: npt.ArrayLike, scores: npt.ArrayLike) -> PairCounts:
    """Count all pairs exactly in O(n log n)."""
    t, s = _pair(target, scores)
    t_rank, s_rank = (np.unique(values, return_inverse=True)[1].reshape(-1) for values in (t, s))
    order = np.lexsort((s_rank, t_rank))  # among equal targets by score, so that they contribute no inversion
    discordant = _inversions(s_rank[order])
    pairs = len(t) * (len(t) - 1) // 2
    tied_t, tied_s = _tied(t_rank), _tied(s_rank)
    tied_both = _tied(t_rank.astype(np.int64) * (int(s_rank.max()) + 1) + s_rank)
    concordant = pairs - tied_t - tied_s + tied_both - discordant
    return PairCounts(pairs, concordant, discordant, tied_t, tied_s)


def opa(target: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """Ordered pair accuracy: of the pairs with different targets, the share scored in that order; NaN without any."""
    counts = count_pairs(target, scores)
    decided = counts.pairs - counts.tied_target
    return counts.concordant / decided if decided else float("nan")


def kendall_tau(target: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """Kendall's tau-b; NaN when either side is constant."""
    counts = count_pairs(target, scores)
    scale = float(counts.pairs - counts.tied_target) * float(counts.pairs - counts.tied_scores)
    return (counts.concordant - counts.discordant) / scale**0.5 if scale else float("nan")


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float


def bootstrap(values: npt.ArrayLike, *, seed: int = 0, draws: int = 2000, level: float = 0.95) -> Estimate:
    """Mean over kernels and its percentile interval; NaNs (kernels where a metric means nothing) are left out."""
    v = np.asarray(values, dtype=np.float64)
    v = v[~np.isnan(v)]
    if not len(v):
        return Estimate(float("nan"), float("nan"), float("nan"))
    low, high = np.quantile(resampled_means(v, draws, seed), [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(v.mean()), float(low), float(high))


def over_seeds(values: Sequence[float]) -> Estimate:
    """Mean over a few seeds with the 95 % interval of Student's t; one seed has no interval beyond itself."""
    v = np.asarray(values, dtype=np.float64)
    mean = float(v.mean())
    if len(v) < 2:
        return Estimate(mean, mean, mean)
    quantile = _STUDENT[min(len(v) - 2, len(_STUDENT) - 1)]
    half = quantile * float(v.std(ddof=1)) / len(v) ** 0.5
    return Estimate(mean, mean - half, mean + half)


# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom; beyond, the last is a safe stand-in.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)


def repeat_noise(config_feats: Sequence[Floats], targets: Sequence[Floats]) -> float | None:
    """Standard deviation of log runtime between exact repeats of a configuration, pooled; None without repeats."""
    squares, degrees = 0.0, 0
    for feats, target in zip(config_feats, targets, strict=True):
        _, group, sizes = np.unique(feats, axis=0, return_inverse=True, return_counts=True)
        logs, group = np.log(target), group.reshape(-1)
        means = np.bincount(group, logs) / sizes
        squares += float(((logs - means[group]) ** 2).sum())
        degrees += len(logs) - len(sizes)
    return (squares / degrees) ** 0.5 if degrees else None


def noise_ceiling(targets: Sequence[Floats], noise: float, k: int, *, seed: int = 0, draws: int = 50) -> float:
    """The top-k error left to a model that knows every runtime as well as one more noisy measurement would tell it."""
    rng = np.random.default_rng(seed)
    errors = [
        top_k_error(target, np.log(target) + noise * rng.standard_normal(len(target)), k)
        for target in targets
        for _ in range(draws)
    ]
    return float(np.mean(errors))


def _pair(target: npt.ArrayLike, scores: npt.ArrayLike) -> tuple[Floats, Floats]:
    t, s = np.asarray(target, dtype=np.float64), np.asarray(scores, dtype=np.float64)
    if t.ndim != 1 or t.shape != s.shape or not len(t):
        raise ShapeError(f"Runtimes of shape {t.shape} and scores of shape {s.shape}: one of each per configuration.")
    return t, s


def _tied(ranks: npt.NDArray[np.intp]) -> int:
    sizes = np.unique(ranks, return_counts=True)[1].astype(object)  # Python integers: no overflow at any length
    return int((sizes * (sizes - 1) // 2).sum())


def _inversions(ranks: npt.NDArray[np.intp]) -> int:
    """Pairs i < j with ranks[i] > ranks[j]: such a pair first differs at one bit, where i has 1 and j has 0."""
    total = 0
    for bit in reversed(range(int(ranks.max()).bit_length())):
        prefix = ranks >> (bit + 1)
        order = np.argsort(prefix, kind="stable")
        ones = ((ranks[order] >> bit) & 1).astype(np.int64)
        before = np.cumsum(ones) - ones
        starts = np.flatnonzero(np.diff(prefix[order], prepend=-1))
        group_of = np.cumsum(np.diff(prefix[order], prepend=-1) != 0) - 1
        total += int(((before - before[starts][group_of]) * (1 - ones)).sum())
    return total
