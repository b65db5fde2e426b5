"""The statistics behind the Timer, on NumPy alone, chosen for noise that is skewed, heavy-tailed and correlated.

Intervals come from a circular block bootstrap, because neighbouring timings share their disturbances and a plain
bootstrap would be too sure of itself. Two functions are compared on log-ratios from blocks in which each ran in a
random order and then in the reverse order: under "no difference" every block is as likely as its mirror image, so
flipping the signs gives an exact test whatever the noise looks like.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A confidence interval."""

    low: float
    high: float
    confidence: float = 0.95

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def bootstrap_intervals(
    samples: Floats,
    statistics: dict[str, Callable[[Floats], Floats]],
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Interval]:
    """Block-bootstrap percentile intervals; each statistic maps (resamples, n) to (resamples,)."""
    n = len(samples)
    block = max(1, round(n ** (1 / 3)))
    starts = np.random.default_rng(seed).integers(0, n, (resamples, -(-n // block)))
    positions = (starts[:, :, None] + np.arange(block)) % n  # (resamples, blocks, block)
    drawn = samples[positions.reshape(resamples, -1)[:, :n]]
    tail = (1 - confidence) / 2
    intervals = {}
    for name, statistic in statistics.items():
        low, high = np.quantile(statistic(drawn), [tail, 1 - tail])
        intervals[name] = Interval(float(low), float(high), confidence)
    return intervals


def resampled_means(values: ArrayLike, draws: int, seed: int) -> Floats:
    """The means of as many of the values, drawn with replacement, so many times: the plain bootstrap."""
    v, rng = np.asarray(values, np.float64), np.random.default_rng(seed)
    return np.array([v[rng.integers(0, len(v), len(v))].mean() for _ in range(draws)])


@dataclass(frozen=True)
class PairedTest:
    """Centre of paired differences (Hodges-Lehmann), its interval, and the p-value of "the centre is zero"."""

    centre: float
    interval: Interval
    p_value: float


def signed_rank_test(
    differences: Floats, confidence: float = 0.95, permutations: int = 10_000, seed: int = 0
) -> PairedTest:
    """Wilcoxon's signed-rank test by random sign flips. Ties and outliers do not upset it."""
    n = len(differences)
    averages = np.sort(((differences[:, None] + differences[None, :]) / 2)[np.triu_indices(n)])
    ranks = _mid_ranks(np.abs(differences)) * (differences != 0)
    observed = abs(float(np.sum(np.sign(differences) * ranks)))
    signs = np.random.default_rng(seed).integers(0, 2, (permutations, n), dtype=np.int8) * 2 - 1
    flipped = np.abs(signs.astype(np.float64) @ ranks)
    p_value = (1 + int(np.sum(flipped >= observed - 1e-9))) / (1 + permutations)
    return PairedTest(float(np.median(averages)), _walsh_interval(averages, n, confidence), p_value)


def _walsh_interval(averages: Floats, n: int, confidence: float) -> Interval:
    """The interval that the signed-rank test would not reject, by its normal approximation."""
    count = len(averages)
    z = normal_quantile(0.5 + confidence / 2)
    cut = int(np.floor(count / 2 - z * np.sqrt(n * (n + 1) * (2 * n + 1) / 24)))
    cut = min(max(cut, 0), count - 1)
    return Interval(float(averages[cut]), float(averages[count - 1 - cut]), confidence)


def _mid_ranks(values: NDArray[np.generic]) -> Floats:
    """Ranks from 1 on, equal values sharing their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[inverse.reshape(-1)], np.float64)


def rank_correlation(a: ArrayLike, b: ArrayLike) -> float:
    """Spearman's coefficient, ties sharing their mean rank; 1 where both are constant, 0 where one is.

    >>> rank_correlation([1, 2, 3, 4], [10, 20, 40, 30])
    0.8
    """
    x, y = _mid_ranks(np.asarray(a)), _mid_ranks(np.asarray(b))
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x @ x) * (y @ y)))
    if scale == 0.0:
        return 1.0 if not (x.any() or y.any()) else 0.0
    return float(x @ y) / scale


def normal_quantile(probability: float) -> float:
    """Inverse of the standard normal distribution, from the standard library."""
    from statistics import NormalDist

    return NormalDist().inv_cdf(probability)
