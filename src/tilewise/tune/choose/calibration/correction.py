"""What a machine's own measurements say about tiles: a Gaussian process in log runtime over the default's.

    y(z, c) = slope (s(c) - s(d)) + f(z, c) - f(z, d),   f ~ GP(0, signal^2 k(z, z') k(c, c'))

z are the sizes of a kernel, c a configuration, d its default, s the scores of a cost model (none: 0). The process is
one of differences, so the default is 0 for certain and only what sets a tile apart from it counts. Lengths are in
doublings. The five numbers are those of the largest likelihood; with some hundreds of measurements all of it is a page
of NumPy and a second of fitting.

`left_out` predicts every kernel by the others alone: what the chooser may promise is decided on that, not on a fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.tune.search.gaussian_process import Hyperparameters, Numbers, climb, similarity

_NUGGET = 1e-8
_ENOUGH = 400
_DEVIATIONS = (0.5, 1.0, 1.5, 2.0, 3.0)
_MARGINS = (0.01, 0.015, 0.02, 0.03, 0.05, 0.08, 0.12)
_MOST_LOSS = 0.015  # of one held-out kernel, in log runtime
_LEAST_GAIN = 0.002  # in the mean over the held-out kernels
_HOPELESS = 0.15  # how much slower than the default a tile is hardly matters beyond this


# What the likelihood is climbed from. The scores' slope is the coefficient, sizes of kernels are its tasks.
_START = Hyperparameters(coefficient=0.0, signal=0.2, length_scale=2.0, noise=0.015, task_length_scale=3.0)


@dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """Measured tiles or candidates, one a row: sizes of the kernel, tile, default, score over the default's."""

    sizes: Numbers  # (N, dz)
    config: Numbers  # (N, dc)
    default: Numbers  # (N, dc)
    score: Numbers  # (N,)

    def __len__(self) -> int:
        return len(self.score)


def squashed(log_ratio: Numbers) -> Numbers:
    """Log ratios with bad tiles brought near: a few that are many times slower would decide what noise is."""
    slower = _HOPELESS * np.tanh(np.maximum(log_ratio, 0.0) / _HOPELESS)
    return np.asarray(np.where(log_ratio > 0, slower, log_ratio))


@dataclass(frozen=True)
class Promise:
    """A tile replaces the default where mean + `deviations` x deviation is below -`margin`; `gain` is what that was
    worth on held-out kernels, in the mean of log runtime, `worst` the most that one of them lost."""

    deviations: float
    margin: float
    gain: float
    worst: float


def promise_of(mean: Numbers, deviation: Numbers, log_ratio: Numbers, group: npt.NDArray[np.int64]) -> Promise | None:
    """The promise that gains most on kernels left out and loses on none; None where there is no such."""
    found: list[Promise] = []
    for deviations in _DEVIATIONS:
        bound = mean + deviations * deviation
        picks = [mine[int(np.argmin(bound[mine]))] for g in np.unique(group) if len(mine := np.flatnonzero(group == g))]
        for margin in _MARGINS:
            gains = np.array([-log_ratio[pick] if bound[pick] < -margin else 0.0 for pick in picks])
            found.append(Promise(deviations, margin, float(gains.mean()), float(gains.min())))
    kept = [one for one in found if one.worst >= -_MOST_LOSS and one.gain >= _LEAST_GAIN]
    return max(kept, key=lambda one: (one.gain, one.margin), default=None)


class Correction:
    """The process conditioned on `rows` and their log ratios to the default; `group` says which kernel a row is of,
    `promise` when its word is taken."""

    def __init__(
        self,
        rows: Rows,
        log_ratio: Numbers,
        group: npt.NDArray[np.int64],
        hyper: Hyperparameters | None = None,
        promise: Promise | None = None,
    ) -> None:
        self.rows, self.log_ratio, self.group, self.promise = rows, log_ratio, group, promise
        self.hyper = hyper if hyper is not None else fit(rows, log_ratio)
        covariance = _covariance(rows, rows, self.hyper)
        covariance[np.diag_indices(len(rows))] += self.hyper.noise**2 + _NUGGET
        self._inverse: Numbers = np.asarray(np.linalg.inv(covariance), np.float64)
        self._weights = self._inverse @ (log_ratio - self.hyper.coefficient * rows.score)

    def predict(self, rows: Rows) -> tuple[Numbers, Numbers]:
        """Mean and standard deviation of the log ratio to the default; nothing is known of rows with other columns."""
        if rows.sizes.shape[1:] + rows.config.shape[1:] != self.rows.sizes.shape[1:] + self.rows.config.shape[1:]:
            return np.zeros(len(rows)), np.full(len(rows), np.inf)
        across = _covariance(rows, self.rows, self.hyper)  # (n, N)
        mean = self.hyper.coefficient * rows.score + across @ self._weights
        variance = _own(rows, self.hyper) - ((across @ self._inverse) * across).sum(axis=1)
        return mean, np.sqrt(np.maximum(variance, 1e-10))

    def left_out(self) -> tuple[Numbers, Numbers]:
        """The same for the rows themselves, each kernel predicted without its own measurements."""
        mean, deviation = np.empty_like(self.log_ratio), np.empty_like(self.log_ratio)
        for number in np.unique(self.group):
            mine = np.flatnonzero(self.group == number)
            block = np.linalg.inv(self._inverse[np.ix_(mine, mine)])
            mean[mine] = self.log_ratio[mine] - block @ self._weights[mine]
            deviation[mine] = np.sqrt(np.maximum(np.diag(block) - self.hyper.noise**2, 1e-10))
        return mean, deviation


def fit(rows: Rows, log_ratio: Numbers) -> Hyperparameters:
    """The likeliest numbers; of many rows, some hundred decide."""
    if len(rows) > _ENOUGH:
        some = np.sort(np.random.default_rng(0).permutation(len(rows))[:_ENOUGH])
        rows = Rows(rows.sizes[some], rows.config[some], rows.default[some], rows.score[some])
        log_ratio = log_ratio[some]
    slopes = (0.0, 0.5, 1.0) if np.ptp(rows.score) > 0 else (0.0,)
    names = ("signal", "task_length_scale", "length_scale", "noise")
    starts = [replace(_START, coefficient=slope) for slope in slopes]
    found = [climb(start, names, _changed, lambda h: _surprise(rows, log_ratio, h), 0.3) for start in starts]
    return min(found, key=lambda pair: pair[0])[1]


def _changed(hyper: Hyperparameters, name: str, factor: float) -> Hyperparameters:
    changed: dict[str, Any] = {name: float(np.clip(getattr(hyper, name) * factor, 1e-3, 30.0))}
    return replace(hyper, **changed)


def _surprise(rows: Rows, log_ratio: Numbers, hyper: Hyperparameters) -> float:
    """Negative log likelihood."""
    covariance = _covariance(rows, rows, hyper)
    covariance[np.diag_indices(len(rows))] += hyper.noise**2 + _NUGGET
    try:
        root = np.linalg.cholesky(covariance)
    except np.linalg.LinAlgError:
        return math.inf
    z = np.linalg.solve(root, log_ratio - hyper.coefficient * rows.score)
    return float(0.5 * z @ z + np.log(np.diag(root)).sum())


def _covariance(a: Rows, b: Rows, hyper: Hyperparameters) -> Numbers:
    def alike(x: Numbers, y: Numbers) -> Numbers:
        return similarity(x, y, hyper.length_scale)

    config = alike(a.config, b.config) - alike(a.config, b.default) - alike(a.default, b.config)
    config += alike(a.default, b.default)
    return hyper.signal**2 * similarity(a.sizes, b.sizes, hyper.task_length_scale) * config


def _own(rows: Rows, hyper: Hyperparameters) -> Numbers:
    """The diagonal of `_covariance(rows, rows)`."""
    apart = np.square(rows.config - rows.default).sum(axis=1)
    own: Numbers = 2 * hyper.signal**2 * (1 - np.exp(-0.5 * apart / hyper.length_scale**2))
    return own
