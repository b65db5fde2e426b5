"""A Gaussian process over the log runtimes of the configurations of one problem, given some readings.

The log runtime of configuration i, whose settings are x_i (in doublings) and whose model score is s_i:

    y_i = c + b s_i + f(x_i) + u_i,        a reading is y_i + e_i

    c    the level of this problem                     c ~ N(0, 1): one reading settles it
    b    the coefficient of the scores                 b ~ N(coefficient, coefficient_deviation^2)
    f    an effect that similar configurations share   f ~ GP(0, signal^2 exp(-|x - x'|^2 / 2 length_scale^2))
    u    the residual of one configuration (nugget)    u ~ N(0, nugget^2)
    e    the noise of a reading                        e ~ N(0, noise^2)

All of it is jointly normal, so a reading changes mean and covariance by one outer product (`observe`). The covariance
is the prior's minus the sum of these products. It is evaluated only where it is needed, so that thousands of
configurations cost memory and time in proportion to their number.

Other problems of the same kernel that were measured before are other tasks of the same process. The covariance of f and
of b between two tasks is that within one task times a coregionalization,

    k(z, z') = far + (near - far) exp(-|z - z'|^2 / 2 task_length_scale^2)        z: sizes in doublings;

levels and nuggets are independent.

The next configuration has the largest expected improvement over the best reading y*: with d = y* - m_i and deviation
v_i,

    EI_i = d Phi(d / v_i) + v_i phi(d / v_i).

The stopping rule uses the value of perfect information: the expected saving if the fastest of all were known,
E[max(0, y* - min_i y_i)], from joint draws. The search ends if it is below the worth of a measurement. Before the first
reading, y* is the runtime of the configuration with the lowest mean.

The confidence in the best (`chance_within`) comes from the Student-t process with the same covariance. After n readings
whose squared errors, each divided by its predicted variance, sum to q, all deviations are multiplied by
sqrt((nu + q) / (nu + n)): kernels that were predicted badly stay uncertain.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
H = TypeVar("H")

_FOLLOWED = 64  # configurations in the process if there are scores; the worse-ranked ones are dropped
_MAX_JOINT = 400  # configurations in joint draws: those that may be the fastest; bounds a Cholesky factorization
_DRAWS = 256  # joint samples of the log runtimes; arbitrary
_LEVEL = 1.0  # deviation of c
_DEGREES_OF_FREEDOM = 2.0  # nu, chosen on the kernels that the claims of `confidence.py` are fitted on
_OTHER_LEVEL = 5.0  # deviation of the level of an earlier task; large, so that the level carries no information


@dataclass(frozen=True)
class Hyperparameters:
    """Parameters of the process, with deviations in log runtime.

    `ard` has the weight of each setting (automatic relevance determination); the default is 1.
    """

    coefficient: float = 1.0
    coefficient_deviation: float = 0.5
    signal: float = 0.6
    length_scale: float = 1.5
    nugget: float = 0.12
    noise: float = 0.02
    far: float = 0.45
    near: float = 1.0
    task_length_scale: float = 4.0
    ard: Mapping[str, float] = field(default_factory=dict)
    # Lowest `chance_within` for the claim "within 5 %", by number of measurements (see confidence.py).
    confidence_bounds: Mapping[int, float] = field(default_factory=dict)
    by_score: bool = False  # measure in the order of the scores, not by expected improvement

    def elsewhere(self) -> Hyperparameters:
        """Return hyperparameters for a device that the model was not trained on: they make no claims."""
        return replace(self, confidence_bounds={})

    def coregionalization(self, these: Numbers, those: Numbers) -> Numbers:
        """Return the correlation of runtimes between two lists of problems, from their log2 sizes: (these, those)."""
        return self.far + (self.near - self.far) * similarity(these, those, self.task_length_scale)


@dataclass(frozen=True, eq=False)
class Earlier:
    """Measurements of other problems of the same kernel, one per row."""

    task: npt.NDArray[np.int64]  # which problem, by number
    sizes: Numbers  # (rows, dz) its sizes in doublings
    features: Numbers  # (rows, dx) the configuration in doublings
    score: Numbers  # the model's, over the best of that problem; 0 without a model
    log_runtime: Numbers

    def __len__(self) -> int:
        return len(self.task)


class GaussianProcess:
    """Gaussian process over the log runtimes of one problem's configurations.

    `scores` (lower is faster) and `features` have a row per configuration.
    """

    def __init__(
        self,
        scores: npt.ArrayLike,
        features: Numbers,
        hyper: Hyperparameters,
        earlier: Earlier | None = None,
        sizes: Numbers | None = None,
    ) -> None:
        """Build the prior; condition it on readings of `earlier` problems, given this problem's `sizes`."""
        every = np.asarray(scores, dtype=np.float64)
        self.count = len(every)
        informed = bool((every[1:] != every[-1:]).any())  # the default, which comes first, may lead without a model
        self.followed = np.argsort(every, kind="stable")[: _FOLLOWED if informed else len(every)]
        self._position = {int(index): position for position, index in enumerate(self.followed)}
        self.hyper = h = hyper
        self._x = np.asarray(features, dtype=np.float64)[self.followed]  # (n, dx)
        self._score = every[self.followed] - every[self.followed[0]]  # (n,)
        self.mean = h.coefficient * self._score
        self._variance = (
            h.signal**2 + h.coefficient_deviation**2 * self._score**2 + _LEVEL**2 + h.nugget**2
        )  # (n,), the diagonal of the covariance
        # The posterior covariance is the prior minus `left.T @ right`; both are (updates, n).
        self._left, self._right = np.zeros((0, len(self._x))), np.zeros((0, len(self._x)))
        self.tasks = 0 if earlier is None else len(np.unique(earlier.task))
        if earlier is not None and len(earlier):
            self._condition(earlier, np.zeros(0) if sizes is None else sizes)
        # q and n: squared standardized errors of the predictions so far, and their number.
        self._errors, self._predictions = 0.0, 0
        self.log_runtimes: dict[int, float] = {}  # configuration: log runtime
        self.failed: set[int] = set()

    def _condition(self, earlier: Earlier, sizes: Numbers) -> None:
        """Condition the prior on measurements of other problems; `sizes` are this problem's log2 sizes."""
        h, x, s = self.hyper, earlier.features, earlier.score
        same_task = earlier.task[:, None] == earlier.task[None, :]  # (N, N)
        task_covariance = np.where(same_task, 1.0, h.coregionalization(earlier.sizes, earlier.sizes))
        own = h.signal**2 * similarity(x, x, h.length_scale) + h.coefficient_deviation**2 * np.outer(s, s)  # (N, N)
        # Effects of different tasks are correlated; their levels are independent and practically unknown.
        own *= task_covariance
        own += _OTHER_LEVEL**2 * same_task
        own[np.diag_indices(len(s))] += h.nugget**2 + h.noise**2
        near = h.coregionalization(sizes[None, :], earlier.sizes)  # (1, N)
        across = h.signal**2 * similarity(self._x, x, h.length_scale)
        across = (across + h.coefficient_deviation**2 * np.outer(self._score, s)) * near  # (n, N)
        # Posterior mean and covariance, with one solve for both.
        residual = earlier.log_runtime - h.coefficient * s
        solved = np.linalg.solve(own, np.column_stack([residual, across.T]))
        self.mean = self.mean + across @ solved[:, 0]
        self._subtract(across.T, np.asarray(solved[:, 1:], np.float64))

    def _subtract(self, left: Numbers, right: Numbers) -> None:
        """Subtract left.T @ right from the covariance matrix, which is stored lazily."""
        self._left, self._right = np.vstack([self._left, left]), np.vstack([self._right, right])
        self._variance = self._variance - (left * right).sum(axis=0)

    @property
    def covariance(self) -> Numbers:
        """Posterior covariance of all configurations, (n, n)."""
        every = np.arange(len(self._x))
        return self.covariance_of(every, every)

    def covariance_of(self, rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64]) -> Numbers:
        """Return the posterior covariance between two lists of positions: (rows, columns)."""
        h = self.hyper
        prior = h.signal**2 * similarity(self._x[rows], self._x[columns], h.length_scale) + _LEVEL**2
        prior += h.coefficient_deviation**2 * np.outer(self._score[rows], self._score[columns])
        prior += h.nugget**2 * (rows[:, None] == columns[None, :])
        covariance: Numbers = prior - self._left[:, rows].T @ self._right[:, columns]
        return covariance

    def observe(self, index: int, log_runtime: float) -> None:
        """Update the posterior with the log runtime of one configuration."""
        position = self._position.get(index)
        if not self.log_runtimes:  # the first reading sets the level; before it, the mean is relative
            self.mean = self.mean + log_runtime - (self.mean[position] if position is not None else self.mean.mean())
        elif position is not None:
            variance = self._variance[position] + self.hyper.noise**2
            self._errors += float((log_runtime - self.mean[position]) ** 2 / max(variance, 1e-12))
            self._predictions += 1
        self.log_runtimes[index] = min(log_runtime, self.log_runtimes.get(index, math.inf))
        # Rank-one update of the posterior (a Kalman filter step).
        if position is not None:
            column = self.covariance_of(np.arange(len(self._x)), np.array([position]))[:, 0]  # (n,)
            gain = column / (column[position] + self.hyper.noise**2)
            self.mean = self.mean + gain * (log_runtime - self.mean[position])
            self._subtract(gain[None, :], column[None, :])

    def refuse(self, index: int) -> None:
        """Exclude a failed configuration from further proposals."""
        self.failed.add(index)

    @property
    def best(self) -> int | None:
        """Index of the fastest measured configuration; None before any measurement."""
        return (
            min(self.log_runtimes, key=lambda index: (self.log_runtimes[index], index)) if self.log_runtimes else None
        )

    @property
    def exhausted(self) -> bool:
        """Whether every configuration was measured or has failed."""
        return len(self.log_runtimes) + len(self.failed) >= self.count

    def open(self) -> npt.NDArray[np.int64]:
        """Return the indices of configurations that are neither measured nor failed."""
        done = (*self.log_runtimes, *self.failed)
        tried_positions = [self._position[index] for index in done if index in self._position]
        return np.setdiff1d(np.arange(len(self.followed)), tried_positions)

    def first(self) -> int | None:
        """Return the configuration with the lowest expected runtime, the choice without measurements."""
        positions = self.open()
        return int(self.followed[positions[int(np.argmin(self.mean[positions]))]]) if len(positions) else None

    def next(self) -> int | None:
        """Return the configuration to measure next; None if all are measured or failed.

        The first one has the lowest mean. The next ones follow the order of the scores, with `by_score`, or have the
        largest expected improvement.
        """
        positions = self.open()
        if not len(positions) or self.best is None:
            return self.first()
        if self.hyper.by_score:
            return int(self.followed[positions[0]])  # `followed` is sorted by score
        return int(self.followed[positions[int(np.argmax(self.expected_improvement(positions)))]])

    def expected_improvement(self, positions: npt.NDArray[np.int64]) -> Numbers:
        """Return the expected improvement in log runtime over the best measured one (Jones et al. 1998)."""
        assert self.best is not None
        deviation = self._deviation(positions)
        # Closed form for a normal distribution.
        ahead = self.log_runtimes[self.best] - self.mean[positions]
        z = ahead / deviation
        improvement: Numbers = ahead * _normal(z) + deviation * np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        return improvement

    def _deviation(self, positions: npt.NDArray[np.int64]) -> Numbers:
        """Return the standard deviation of the log runtimes at these positions."""
        deviation: Numbers = np.sqrt(np.maximum(self._variance[positions], 1e-12))
        return deviation

    def value_of_information(self) -> float:
        """Return the expected reduction in log runtime if all runtimes became known."""
        return float(np.maximum(self._behind(), 0.0).mean())

    def chance_within(self, share: float) -> float:
        """Estimate the probability that the choice is at most `share` slower than the fastest."""
        scale = math.sqrt((_DEGREES_OF_FREEDOM + self._errors) / (_DEGREES_OF_FREEDOM + self._predictions))
        return float((self._behind(scale) <= math.log1p(share)).mean())

    def _behind(self, scale: float = 1.0) -> Numbers:
        """Sample the log slowdown of the current choice against the fastest other configuration."""
        positions = self.open()
        if not len(positions):
            return np.zeros(1)
        if len(positions) > _MAX_JOINT:  # the others are unlikely to be the fastest
            lowest = np.argsort(self.mean[positions] - 2 * self._deviation(positions), kind="stable")[:_MAX_JOINT]
            positions = positions[np.sort(lowest)]
        root = _root(self.covariance_of(positions, positions))
        # Without a reading, the reference is the first choice in the same draw.
        draws = self.mean[positions][:, None] + scale * (root @ _standard_normal(len(positions)))  # (n, draws)
        best = self.best
        reference = draws[int(np.argmin(self.mean[positions]))] if best is None else self.log_runtimes[best]
        return np.asarray(reference - draws.min(axis=0))


@functools.lru_cache(maxsize=8)
def _standard_normal(count: int) -> Numbers:
    """Return fixed samples (samples, count) of a standard normal, with mirror images (antithetic variates)."""
    draws = np.random.default_rng(count).standard_normal((count, _DRAWS // 2))
    return np.hstack([draws, -draws])


def similarity(a: Numbers, b: Numbers, length_scale: float) -> Numbers:
    """Return the squared exponential kernel between rows of a and b: (rows of a, rows of b), 1 for equal rows."""
    if not a.shape[1]:
        return np.ones((len(a), len(b)))
    squared = (a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1)[None, :] - 2 * a @ b.T
    kernel: Numbers = np.exp(-0.5 * np.maximum(squared, 0.0) / length_scale**2)
    return kernel


def climb(
    best: H,
    names: Sequence[str],
    changed: Callable[[H, str, float], H],
    surprise: Callable[[H], float],
    min_step: float,
) -> tuple[float, H]:
    """Minimize a function of hyperparameters, the negative log likelihood `surprise`, by coordinate search.

    Each hyperparameter is tried larger and smaller (`changed` multiplies one of them by a factor) until nothing
    improves, then again with half the step, down to `min_step`. Returns (minimum, hyperparameters).
    """
    # Steps are factors: exp(0.7) is about 2, and min_step ends the halving.
    lowest, step = surprise(best), 0.7
    while step > min_step:
        improved = False
        for name in names:
            for factor in (math.exp(step), math.exp(-step)):
                candidate = changed(best, name, factor)
                value = surprise(candidate)
                if value < lowest - 1e-6:
                    best, lowest, improved = candidate, value, True
                    break
        if not improved:
            step /= 2
    return lowest, best


def _root(covariance: Numbers) -> Numbers:
    """Return the Cholesky factor of a covariance that rounding may have made slightly indefinite."""
    # Add the smallest multiple of the identity that makes the matrix positive definite.
    jitter = 1e-10 + 1e-9 * float(np.trace(covariance)) / len(covariance)
    for _ in range(6):
        try:
            return np.asarray(np.linalg.cholesky(covariance + jitter * np.eye(len(covariance))))
        except np.linalg.LinAlgError:
            jitter *= 100
    return np.diag(np.sqrt(np.maximum(np.diag(covariance), 0.0)))


def _normal(z: Numbers) -> Numbers:
    """Compute the normal distribution function, to 1.5e-7 (Abramowitz and Stegun 7.1.26)."""
    x = np.abs(z) / math.sqrt(2)
    t = 1 / (1 + 0.3275911 * x)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    upper = 1 - 0.5 * series * np.exp(-x * x)
    below: Numbers = np.where(z >= 0, upper, 1 - upper)
    return below
