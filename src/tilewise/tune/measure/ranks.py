"""Spearman's rank correlation: how far two lists of runtimes put the same configurations in the same order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def rank_correlation(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """Spearman's coefficient, ties sharing their mean rank; 1 where both are constant.

    >>> rank_correlation([1, 2, 3, 4], [10, 20, 40, 30])
    0.8
    """
    x, y = _ranks(np.asarray(a)), _ranks(np.asarray(b))
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x @ x) * (y @ y)))
    if scale == 0.0:
        return 1.0 if not (x.any() or y.any()) else 0.0
    return float(x @ y) / scale


def _ranks(values: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2.0)[inverse.reshape(-1)], np.float64)
