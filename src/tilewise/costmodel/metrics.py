"""Ranking metrics: top-k error, tile score, ordered pair accuracy, Kendall's tau.

All take one kernel's normalised runtimes and its scores; lower means faster. Pairs are counted exactly in O(n log n),
including ties: the discordant pairs are the inversions of one sequence, counted bit by bit. Equal scores are ranked in
the order of the configurations, so that a result never depends on the sorting algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.kernel import ranking
from tilewise.errors import ShapeError

Floats = npt.NDArray[np.floating[Any]]


def top_k_error(target: npt.ArrayLike, scores: npt.ArrayLike, k: int) -> float:
    """Return the slowdown of the best of the first `k` relative to the best of all: 0 is perfect, 0.1 is 10 %."""
    t, s = _checked_pair(target, scores)
    return float(t[ranking(s)[:k]].min() / t.min() - 1.0)


def random_top_k_error(target: npt.ArrayLike, k: int) -> float:
    """Return the expected top-k error of a random order: that of the best of `k` drawn without replacement."""
    slowdown = np.sort(np.asarray(target, dtype=np.float64))
    slowdown = slowdown / slowdown[0]
    n, faster = len(slowdown), np.arange(len(slowdown))
    # Chance that neither this configuration nor a faster one is drawn; its steps are the chances of being the best.
    none_drawn = np.cumprod(np.maximum(n - k - faster, 0) / (n - faster))
    return float(-np.diff(none_drawn, prepend=1.0) @ slowdown - 1.0)


def tile_score(targets: Sequence[npt.ArrayLike], scores: Sequence[npt.ArrayLike]) -> float:
    """Return Kaggle's score: the mean over kernels of one minus the top-5 error."""
    return float(np.mean([1.0 - top_k_error(t, s, 5) for t, s in zip(targets, scores, strict=True)]))


@dataclass(frozen=True)
class PairCounts:
    """Numbers of configuration pairs: in the true order, in the reverse order, or tied in either sequence."""

    pairs: int
    concordant: int
    discordant: int
    tied_target: int
    tied_scores: int


def count_pairs(target: npt.ArrayLike, scores: npt.ArrayLike) -> PairCounts:
    """Count concordant, discordant and tied pairs exactly in O(n log n)."""
    t, s = _checked_pair(target, scores)
    t_rank, s_rank = (np.unique(values, return_inverse=True)[1].reshape(-1) for values in (t, s))
    # Sort by target and, among equal targets, by score, so that ties contribute no inversion.
    order = np.lexsort((s_rank, t_rank))
    discordant = _count_inversions(s_rank[order])
    pairs = len(t) * (len(t) - 1) // 2
    tied_t, tied_s = _count_ties(t_rank), _count_ties(s_rank)
    tied_both = _count_ties(t_rank.astype(np.int64) * (int(s_rank.max()) + 1) + s_rank)
    # Inclusion and exclusion: pairs tied in both were subtracted twice.
    concordant = pairs - tied_t - tied_s + tied_both - discordant
    return PairCounts(pairs, concordant, discordant, tied_t, tied_s)


def opa(target: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """Return the ordered pair accuracy: the share of pairs with different targets scored in that order; NaN if none."""
    counts = count_pairs(target, scores)
    untied = counts.pairs - counts.tied_target
    return counts.concordant / untied if untied else float("nan")


def kendall_tau(target: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """Return Kendall's tau-b; NaN if either sequence is constant."""
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
    """Return the mean of values, one per kernel, with its bootstrap percentile interval; NaNs are ignored."""
    from tilewise.profile.timing.statistics import resampled_means

    v = np.asarray(values, dtype=np.float64)
    v = v[~np.isnan(v)]
    if not len(v):
        return Estimate(float("nan"), float("nan"), float("nan"))
    low, high = np.quantile(resampled_means(v, draws, seed), [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(v.mean()), float(low), float(high))


def over_seeds(values: npt.ArrayLike) -> Estimate:
    """Return the mean of values with the 95 % interval of Student's t; a single value is its own interval."""
    v = np.asarray(values, dtype=np.float64)
    mean = float(v.mean())
    if len(v) < 2:
        return Estimate(mean, mean, mean)
    quantile = _STUDENT_T[min(len(v) - 2, len(_STUDENT_T) - 1)]
    half_width = quantile * float(v.std(ddof=1)) / len(v) ** 0.5
    return Estimate(mean, mean - half_width, mean + half_width)


# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom. For more the last one is used, which makes
# intervals slightly too wide.
_STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)


def repeat_noise(config_feats: Sequence[Floats], targets: Sequence[Floats]) -> float | None:
    """Return the pooled standard deviation of log runtime between repeats of a configuration; None without repeats."""
    squares, degrees = 0.0, 0
    for feats, target in zip(config_feats, targets, strict=True):
        # Group equal configurations; their runtimes differ by noise alone.
        _, group, sizes = np.unique(feats, axis=0, return_inverse=True, return_counts=True)
        logs, group = np.log(target), group.reshape(-1)
        means = np.bincount(group, logs) / sizes
        squares += float(((logs - means[group]) ** 2).sum())
        # Every group mean costs one degree of freedom.
        degrees += len(logs) - len(sizes)
    return (squares / degrees) ** 0.5 if degrees else None


def noise_ceiling(targets: Sequence[Floats], noise: float, k: int, *, seed: int = 0, draws: int = 50) -> float:
    """Return the top-k error of a model whose scores are one more noisy measurement of every configuration."""
    rng = np.random.default_rng(seed)
    errors = [
        top_k_error(target, np.log(target) + noise * rng.standard_normal(len(target)), k)
        for target in targets
        for _ in range(draws)
    ]
    return float(np.mean(errors))


def _checked_pair(target: npt.ArrayLike, scores: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Convert both to float64 arrays; raise unless they are one-dimensional and equally long."""
    t, s = np.asarray(target, dtype=np.float64), np.asarray(scores, dtype=np.float64)
    if t.ndim != 1 or t.shape != s.shape or not len(t):
        raise ShapeError(f"Runtimes have shape {t.shape} and scores {s.shape}; give one of each per configuration.")
    return t, s


def _count_ties(ranks: npt.NDArray[np.intp]) -> int:
    """Count the pairs of equal ranks."""
    sizes = np.unique(ranks, return_counts=True)[1].astype(object)  # Python integers: no overflow at any length
    return int((sizes * (sizes - 1) // 2).sum())


def _count_inversions(ranks: npt.NDArray[np.intp]) -> int:
    """Count the pairs i < j with ranks[i] > ranks[j] in O(n log n).

    The highest differing bit of such a pair is 1 in i and 0 in j. So for every bit, within groups of equal higher bits,
    count for every 0 the ones before it.
    """
    total = 0
    for bit in reversed(range(int(ranks.max()).bit_length())):
        prefix = ranks >> (bit + 1)
        # A stable sort by the higher bits keeps the sequence order within each group.
        order = np.argsort(prefix, kind="stable")
        ones = ((ranks[order] >> bit) & 1).astype(np.int64)
        # Ones before each position, then relative to the start of its group.
        before = np.cumsum(ones) - ones
        starts = np.flatnonzero(np.diff(prefix[order], prepend=-1))
        group = np.cumsum(np.diff(prefix[order], prepend=-1) != 0) - 1
        total += int(((before - before[starts][group]) * (1 - ones)).sum())
    return total
