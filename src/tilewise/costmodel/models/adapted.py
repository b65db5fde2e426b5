"""Another device: what a model misses there, learnt from a few measurements, and which one to take next.

`adapt` adds boosted trees to a model. They read what the model reads and are fitted to what its scores leave of the log
runtimes measured on the device, fast configurations counting for more. The result is a blend of the two like any other
(see `blend`). Each fifth of the kernels is ranked by trees of the others; where its first choices are slower than the
model's, by more than kernels differ by chance, the model stays as it is.

`next_to_measure` is for one kernel that is being measured: a Gaussian process around the scores says which
configuration has the largest expected improvement. It models the share of the fastest configuration's speed that a
configuration x loses, y = 1 - best / time, so that all slow ones are about alike. The score, s above the kernel's
lowest, makes that m = 1 - exp(-s), and

    y = c + (1 + b) m + f(x, m),      f ~ GP(0, signal^2 Matern(distance of x, m))

where c is the kernel's own level and x are the configuration's columns in doublings. So a measurement speaks for
configurations that are like it and that the model thinks as fast.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.models.blend import Blend
from tilewise.costmodel.models.gbdt import GBDT, fit_trees, tabular
from tilewise.costmodel.models.scorer import Scorer, load_scorer
from tilewise.costmodel.models.trained import BLEND
from tilewise.errors import ConfigurationError

Floats = npt.NDArray[np.float64]
Base = Scorer | GBDT | Blend

LEAST_POINTS = 5
_TREES: dict[str, Any] = {"learning_rate": 0.05, "num_leaves": 15, "min_data_in_leaf": 10, "feature_fraction": 0.5,
                          "lambda_l2": 5.0}  # fmt: skip
_TREE_COUNT = 150
_SHARPNESS = 4.0  # a configuration counts for exp(-so much times its log runtime above the kernel's best)
_FOLDS, _CHOICES = 5, 5
SIGNAL, LENGTH, WIDTH = 0.4, 1.0, 0.5  # deviation of f; distances in x (deviations of a column) and m that matter
_LEVEL, _SLOPE, _NOISE = 25.0, 0.3, 0.1  # variance of c; deviations of b and of a measurement


def adapt(base: str | Path, kernels: Sequence[Kernel]) -> Base:
    """The model in the file `base` with a correction by the measurements in `kernels`; as it is where none helps."""
    model = load_scorer(base)
    if model.record.get("adapted") is not None:
        raise ConfigurationError(f"{base} is adapted already; give the model that it was adapted from.")
    return adapt_model(model, kernels)


def adapt_model(model: Base, kernels: Sequence[Kernel]) -> Base:
    """See `adapt`; what was found is in the `adapted` of the record."""
    labelled = [kernel for kernel in kernels if kernel.labelled and kernel.n_configs > 1]
    count = sum(kernel.n_configs for kernel in labelled)
    if count < LEAST_POINTS:
        raise ConfigurationError(f"Adapting needs {LEAST_POINTS} measured configurations at least; there are {count}.")
    points = [_Points.of(model, kernel) for kernel in labelled]
    plain, error, worse = _left_out(points)
    kept = not worse
    told = {"measurements": count, "kernels": len(labelled), "left_out": {"base": plain, "adapted": error}}
    record: dict[str, Any] = {"calibration": None, "adapted": told | {"kept": kept}}
    if not kept:
        same = copy.copy(model)
        same.record = model.record | record
        return same
    slope, booster = _fit(points)
    trees = GBDT(booster, model.preparation, model.schema, {"model": "GBDT", "ranks": False})
    parts, weights = (model.parts, model.weights) if isinstance(model, Blend) else ([model], [1.0])
    return Blend([*parts, trees], [*(slope * weight for weight in weights), 1.0], {"model": BLEND} | record)


@dataclass(frozen=True, eq=False)
class _Points:
    """A kernel's measurements: what the trees read, the model's scores, log runtimes above the best, their weights."""

    table: npt.NDArray[np.float32]
    scores: Floats
    logs: Floats
    weights: Floats

    @classmethod
    def of(cls, model: Base, kernel: Kernel) -> _Points:
        logs = np.log(kernel.target.astype(np.float64) / float(kernel.target.min()))
        scores = np.asarray(model.score(kernel), dtype=np.float64)
        return cls(tabular(model.preparation, kernel), scores - scores.min(), logs, np.exp(-_SHARPNESS * logs))

    def some(self, rows: npt.NDArray[np.int64]) -> _Points:
        return _Points(self.table[rows], self.scores[rows], self.logs[rows], self.weights[rows])

    def centred(self, values: Floats) -> Floats:
        """Without the kernel's level."""
        return np.asarray(values - self.weights @ values / self.weights.sum())


def _slope(points: Sequence[_Points]) -> float:
    """What a score is worth in log runtime on this device; 1 where the measurements do not say."""
    pairs = [(p.centred(p.scores), p.centred(p.logs), p.weights) for p in points]
    above, below = sum(w @ (s * y) for s, y, w in pairs), sum(w @ (s * s) for s, _, w in pairs)
    slope = float(above / below) if below > 1e-12 else 1.0
    return slope if slope > 1e-3 else 1e-3  # a blend's weights are positive


def _fit(points: Sequence[_Points]) -> tuple[float, Any]:
    slope = _slope(points)
    table, weights = (np.concatenate([getattr(p, name) for p in points]) for name in ("table", "weights"))
    rest = np.concatenate([p.logs - slope * p.scores for p in points])
    return slope, fit_trees(table, rest, _TREE_COUNT, _TREES, weights)


def _left_out(points: Sequence[_Points]) -> tuple[float, float, bool]:
    """How much longer than the fastest the model's first choices take, and the adapted one's, on kernels that it was
    not adapted to (of fewer than three kernels, on such configurations): the mean over the best of one to five; and
    whether it is more by a standard error, or the same everywhere."""
    logs = []
    for seen, unseen in _folds(points):
        slope, booster = _fit(seen)
        for p in unseen:
            adapted = slope * p.scores + booster.predict(p.table)
            logs.append([_behind(p.logs, scores) for scores in (p.scores, adapted)])
    plain, error = np.expm1(np.mean(logs, axis=0))
    more = np.subtract(*np.transpose(logs)[::-1])
    chance = float(more.std(ddof=1)) / len(more) ** 0.5 if len(more) > 1 else 0.0
    return float(plain), float(error), bool(more.mean() > chance or not more.any())


def _behind(logs: Floats, scores: Floats) -> float:
    """By how much the best of the first one to five choices is behind the fastest, in the mean."""
    best = np.minimum.accumulate(logs[np.argsort(scores, kind="stable")[:_CHOICES]])
    return float(best.mean() - logs.min())


def _folds(points: Sequence[_Points]) -> list[tuple[list[_Points], list[_Points]]]:
    """What is fitted to and what is held out, so many times."""
    rng = np.random.default_rng(0)
    if len(points) < 3:
        count = max(2, min(_FOLDS, min(len(p.logs) for p in points) // 2))
        parts = [[p.some(rows) for rows in np.array_split(rng.permutation(len(p.logs)), count)] for p in points]
        pieces = [list(piece) for piece in zip(*parts, strict=True)]
    else:
        order = np.array_split(rng.permutation(len(points)), min(_FOLDS, len(points)))
        pieces = [[points[int(i)] for i in rows] for rows in order]
    rest = [[p for other in pieces if other is not piece for p in other] for piece in pieces]
    return list(zip(rest, pieces, strict=True))


@dataclass(frozen=True)
class Likeness:
    """What makes two configurations alike, and how much one then says of the other."""

    signal: float = SIGNAL
    length: float = LENGTH
    width: float = WIDTH


def next_to_measure(
    model: Any, kernel: Kernel, rows: Sequence[int], runtimes: Sequence[float], likeness: Likeness | None = None
) -> int:
    """The configuration of `kernel` to measure next, after those in `rows`; the base's first choice before any.

    >>> next_to_measure(load_scorer("model.safetensors"), kernel, [17, 4], [1.25e6, 1.31e6])  # doctest: +SKIP
    230
    """
    likeness = likeness or Likeness()
    m = _lost(model.score(kernel))
    if not len(rows):
        return int(np.argmin(m))
    if len(set(rows)) >= kernel.n_configs:
        raise ConfigurationError(f"All {kernel.n_configs} configurations of {kernel.name} are measured.")
    x = _inputs(model, kernel, m, likeness)
    taken = np.asarray(rows)
    shared = likeness.signal**2 * _matern(x, x[taken]) + _SLOPE**2 * np.outer(m, m[taken]) + _LEVEL
    inverse = np.linalg.inv(shared[taken] + _NOISE**2 * np.eye(len(taken)))
    mean = m + shared @ (inverse @ (_speed_lost(np.asarray(runtimes, np.float64)) - m[taken]))
    prior = likeness.signal**2 + _SLOPE**2 * m**2 + _LEVEL
    deviation = np.sqrt(np.maximum(prior - np.einsum("ij,jk,ik->i", shared, inverse, shared), 1e-12))
    gain = _expected_improvement(mean, deviation)
    gain[taken] = -np.inf
    return int(np.argmax(gain))


def _expected_improvement(mean: Floats, deviation: Floats) -> Floats:
    """Of a loss below the best measured one, 0. Phi is taken as a logistic curve: only the order counts."""
    u = -mean / deviation
    below = 1.0 / (1.0 + np.exp(-np.clip(1.702 * u, -30.0, 30.0)))
    return np.asarray(deviation * (u * below + np.exp(-0.5 * u * u) / np.sqrt(2.0 * np.pi)))


def _lost(scores: npt.NDArray[Any]) -> Floats:
    """The share of speed lost, as the base thinks: its scores are near enough to log runtimes."""
    wide = scores.astype(np.float64)
    return np.asarray(-np.expm1(wide.min() - wide))


def _speed_lost(times: npt.NDArray[Any]) -> Floats:
    return np.asarray(1.0 - times.min() / times, dtype=np.float64)


def _inputs(model: Any, kernel: Kernel, lost: Floats, likeness: Likeness) -> Floats:
    """The columns that vary, in the model's training or here, each as wide as the others, and the share lost.

    A kernel's configurations may share a setting in which thousands of others differ, so they do not say alone.
    """
    low, high = kernel.config_feat.min(axis=0), kernel.config_feat.max(axis=0)
    features = getattr(model, "preparation", None)
    seen = getattr(features, "config_low", low), getattr(features, "config_high", high)
    if seen[0].shape == low.shape == seen[1].shape:
        low, high = np.minimum(low, seen[0]), np.maximum(high, seen[1])
    span = np.abs(_doublings(high) - _doublings(low))
    columns = np.flatnonzero(span > 0)
    scales = np.sqrt(12.0) / span[columns] / likeness.length  # values spread evenly have the deviation span / sqrt(12)
    return np.hstack([_doublings(kernel.config_feat[:, columns]) * scales, lost[:, None] / likeness.width])


def _doublings(values: npt.NDArray[Any]) -> Floats:
    wide = values.astype(np.float64)
    return np.asarray(np.copysign(np.log2(1.0 + np.abs(wide)), wide))


def _matern(a: Floats, b: Floats) -> Floats:
    """Matern's covariance of smoothness 3/2: once differentiable, as runtimes hardly are more."""
    squared = (a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1)[None, :] - 2 * a @ b.T
    distance = np.sqrt(3.0 * np.maximum(squared, 0.0))
    return np.asarray((1.0 + distance) * np.exp(-distance))
