"""A model adapted to a new device: the base's scores, and a Gaussian process for what they miss there.

What is modelled is the share of the fastest configuration's speed that a configuration x loses, y = 1 - best / time,
so that all slow ones are about alike. The base's score, s above the kernel's lowest, makes that m = 1 - exp(-s), and

    y = c + (1 + b) m + f(x, m),      f ~ GP(0, SIGNAL^2 Matern(distance of x, m))

where c is the kernel's own level and x are the configuration's columns and the kernel's sizes in doublings. So a
measurement speaks for configurations that are like it and that the base thinks as fast.

`next_to_measure` gives the configuration with the largest expected improvement: what may be fast is worth a look even
where the base expects little. `Adapted.score`, the expected y, is for choosing without another measurement. The base
stays alone where measurements are not predicted clearly better from each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import Schema
from tilewise.costmodel.features.ranker import kernel_sizes
from tilewise.costmodel.models.blend import Blend
from tilewise.costmodel.models.files import read_tensors, write_tensors
from tilewise.costmodel.models.gbdt import GBDT
from tilewise.costmodel.models.scorer import Scorer, load_scorer
from tilewise.costmodel.models.trained import fitting, model_path
from tilewise.errors import ConfigurationError, FileFormatError

Floats = npt.NDArray[np.float64]

MOST_POINTS = 2000
LEAST_POINTS = 5
SIGNAL, LENGTH, WIDTH = 0.4, 1.0, 0.5  # deviation of f; distances in x (deviations of a column) and m that matter
_LEVEL, _SLOPE, _NOISE = 25.0, 0.3, 0.1  # variance of c; deviations of b and of a measurement
_PER_DOUBLING = 0.5  # how far kernels are apart for each doubling of a size
_BETTER = 0.9  # of the base's error: a smaller gain is not told from chance
_TABLES = ("points", "weights", "columns", "scales", "slope")


@dataclass(frozen=True)
class Likeness:
    """What makes two configurations alike, and how much one then says of the other."""

    signal: float = SIGNAL
    length: float = LENGTH
    width: float = WIDTH


@dataclass(eq=False)
class Adapted:
    """A base model with a correction; without points it is the base alone."""

    base: Scorer | GBDT | Blend
    tables: dict[str, npt.NDArray[Any]]
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def schema(self) -> Schema:
        return self.base.schema

    @property
    def calibration(self) -> dict[str, Any] | None:
        """What was fitted to the base says nothing of another device."""
        return None

    def score(self, kernel: Kernel, rows: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float32]:
        """One score per configuration, lower is faster."""
        scores = self.base.score(kernel, rows)
        with fitting(self.name):
            if not len(self.tables["points"]):
                return scores
            lost = _lost(scores)
            x = _inputs(kernel, lost, self.tables, rows)
            found = SIGNAL**2 * _matern(x, self.tables["points"].astype(np.float64)) @ self.tables["weights"]
            return np.asarray(lost + found + float(self.tables["slope"][0]) * lost, dtype=np.float32)

    def save(self, path: str | Path, base: str | Path) -> None:
        """One file, with everything in the base's own."""
        tensors, record = read_tensors(model_path(base))
        added = {f"adapt.{name}": np.ascontiguousarray(self.tables[name]) for name in _TABLES}
        write_tensors(Path(path), tensors | added, record | {"calibration": None, "adapted": self.record})


def adapt(base: str | Path, kernels: Sequence[Kernel]) -> Adapted:
    """The model in the file `base`, fitted to the measurements in `kernels`; the base as it is where none help."""
    model = load_adapted(base)
    if isinstance(model, Adapted):
        raise ConfigurationError(f"{base} is adapted already; give the model that it was adapted from.")
    return adapt_model(model, kernels)


def adapt_model(model: Scorer | GBDT | Blend, kernels: Sequence[Kernel]) -> Adapted:
    """See `adapt`."""
    labelled = [kernel for kernel in kernels if kernel.labelled and kernel.n_configs > 1]
    count = sum(kernel.n_configs for kernel in labelled)
    if count < LEAST_POINTS:
        raise ConfigurationError(f"Adapting needs {LEAST_POINTS} measured configurations at least; there are {count}.")
    labelled = _thinned(labelled, count)
    tables = _layout(model, labelled, Likeness())
    thought = [_lost(model.score(kernel)) for kernel in labelled]
    x = np.concatenate([_inputs(kernel, m, tables) for kernel, m in zip(labelled, thought, strict=True)])
    owner = np.repeat(np.arange(len(labelled)), [kernel.n_configs for kernel in labelled])
    lost, m = np.concatenate([_speed_lost(kernel.target) for kernel in labelled]), np.concatenate(thought)
    levels = _LEVEL * (owner[:, None] == owner[None, :]) + _SLOPE**2 * np.outer(m, m)
    plain, _ = _left_out(levels, lost - m)
    error, solved = _left_out(levels + SIGNAL**2 * _matern(x, x), lost - m)
    record = {"measurements": len(x), "kernels": len(labelled), "left_out": {"base": plain, "adapted": error}}
    kept = error < _BETTER * plain
    tables["points"] = (x if kept else x[:0]).astype(np.float32)
    tables["weights"] = (solved if kept else solved[:0]).astype(np.float32)
    tables["slope"] = np.array([_SLOPE**2 * m @ solved if kept else 0.0], np.float32)
    return Adapted(model, tables, record | {"kept": kept})


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
    x = _inputs(kernel, m, _layout(model, [kernel], likeness))
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


def _left_out(covariance: Floats, differences: Floats) -> tuple[float, Floats]:
    """How far each measurement is from its prediction by all the others, and the process's weights."""
    inverse = np.linalg.inv(covariance + _NOISE**2 * np.eye(len(differences)))
    solved = inverse @ differences
    return float(np.sqrt(np.mean((solved / np.diag(inverse)) ** 2))), solved


def _thinned(kernels: Sequence[Kernel], count: int) -> list[Kernel]:
    """The same kernels with at most `MOST_POINTS` configurations together; the fastest of each stay."""
    share = min(1.0, MOST_POINTS / count)
    thinned = []
    for kernel in kernels:
        rows = np.sort(np.argsort(kernel.target, kind="stable")[: max(2, int(share * kernel.n_configs))])
        cut = {name: getattr(kernel, name)[rows] for name in ("config_feat", "runtime", "normalizer")}
        thinned.append(kernel if share == 1.0 else dataclasses.replace(kernel, **cut))
    return thinned


def _layout(model: Any, kernels: Sequence[Kernel], likeness: Likeness) -> dict[str, npt.NDArray[Any]]:
    """Which columns vary, in the base's training or here, and what makes each as wide as the others.

    A few measurements may share a setting in which thousands of configurations differ, so they do not say alone.
    """
    config = np.concatenate([kernel.config_feat for kernel in kernels])
    low, high = config.min(axis=0), config.max(axis=0)
    features = getattr(model, "preparation", None)
    seen = getattr(features, "config_low", low), getattr(features, "config_high", high)
    if seen[0].shape == low.shape == seen[1].shape:
        low, high = np.minimum(low, seen[0]), np.maximum(high, seen[1])
    span = np.abs(_doublings(high) - _doublings(low))
    columns = np.flatnonzero(span > 0)
    scales = np.sqrt(12.0) / span[columns] / likeness.length  # values spread evenly have the deviation span / sqrt(12)
    return {"columns": columns, "scales": np.append(scales, 1.0 / likeness.width).astype(np.float32)}


def _inputs(
    kernel: Kernel, lost: Floats, tables: Mapping[str, npt.NDArray[Any]], rows: npt.NDArray[np.int64] | None = None
) -> Floats:
    config = kernel.config_feat if rows is None else kernel.config_feat[rows]
    scales = tables["scales"].astype(np.float64)
    own = _doublings(config[:, tables["columns"]]) * scales[:-1]
    sizes = np.broadcast_to(_PER_DOUBLING * _doublings(kernel_sizes(kernel)), (len(own), len(kernel_sizes(kernel))))
    return np.hstack([own, sizes, scales[-1] * lost[:, None]])


def _doublings(values: npt.NDArray[Any]) -> Floats:
    wide = values.astype(np.float64)
    return np.asarray(np.copysign(np.log2(1.0 + np.abs(wide)), wide))


def _matern(a: Floats, b: Floats) -> Floats:
    """Matern's covariance of smoothness 3/2: once differentiable, as runtimes hardly are more."""
    squared = (a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1)[None, :] - 2 * a @ b.T
    distance = np.sqrt(3.0 * np.maximum(squared, 0.0))
    return np.asarray((1.0 + distance) * np.exp(-distance))


def load_adapted(path: str | Path) -> Scorer | GBDT | Blend | Adapted:
    """The scorer in a file, with its correction where the file has one."""
    model = load_scorer(path)
    said = model.record.get("adapted")
    if said is None:
        return model
    tensors, _ = read_tensors(model_path(path))
    tables = {name: tensors.get(f"adapt.{name}") for name in _TABLES}
    if not isinstance(said, dict) or any(table is None for table in tables.values()):
        raise FileFormatError(f"{path} says that it is adapted and lacks the tables of that; adapt it again.")
    found = {name: table for name, table in tables.items() if table is not None}
    _check(found, path)
    return Adapted(model, found, said)


def _check(tables: Mapping[str, npt.NDArray[Any]], path: str | Path) -> None:
    points, columns = tables["points"], tables["columns"]
    shapes = {
        "weights": points.shape[:1],
        "columns": (columns.size,),
        "scales": (columns.size + 1,),
        "slope": (1,),
    }
    whole = points.ndim == 2 and columns.dtype.kind in "iu" and bool((columns >= 0).all())
    if not whole or any(tables[name].shape != shape for name, shape in shapes.items()):
        raise FileFormatError(f"{path}: the tables of its adaptation do not fit each other; adapt it again.")
