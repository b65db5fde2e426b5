"""A model adapted to a new device: the base's scores, and a Gaussian process for what they miss there.

The log runtime of configuration x of a kernel, with the base's score s,

    y = c + b s + f(x, s),        f ~ GP(0, signal^2 exp(-|x - x'|^2 / 2 length^2 - (s - s')^2 / 2 width^2))

where c is the kernel's own level and x are the configuration's columns and the kernel's sizes in doublings. A
measurement speaks for configurations that are like it and that the base thinks as fast: twenty slow ones say nothing of
the fastest. Signal and length are chosen by leaving one measurement out: the error of predicting it from the others,
where what is fast counts for more. The base alone is one of the candidates, and anything else must do clearly better.
What the process finds slower than the base thought is believed; what it finds faster only in part, since the first
choice is the one of thousands that looks best, by luck too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import Schema
from tilewise.costmodel.features.ranker import kernel_sizes
from tilewise.costmodel.models.files import read_tensors, write_tensors
from tilewise.costmodel.models.gbdt import GBDT
from tilewise.costmodel.models.scorer import Scorer, load_scorer
from tilewise.costmodel.models.trained import fitting, model_path
from tilewise.errors import ConfigurationError, FileFormatError

Floats = npt.NDArray[np.float64]

MOST_POINTS = 2000
LEAST_POINTS = 5
_SIGNALS, _LENGTHS, _NOISE = (0.1, 0.3, 0.6), (1.0, 2.0, 4.0, 8.0), 0.03
_LEVEL, _COEFFICIENT = 25.0, 0.3  # variance of c, deviation of b
_WIDTH, _FASTER = 0.3, 0.3  # of the deviation of the measured scores; how much of a gain is believed
_BETTER = 0.9  # of the base's error: a smaller gain is not told from chance
_SHARPNESS = 1.0  # how much more the fast ones count
_TABLES = ("points", "weights", "columns", "slots", "scales", "numbers")


@dataclass(eq=False)
class Adapted:
    """A base model with a correction; without points it is the base alone."""

    base: Scorer | GBDT
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
        """One score per configuration, lower is faster: expected log runtime, up to the kernel's level."""
        scores = self.base.score(kernel, rows).astype(np.float64)
        with fitting(self.name):
            if not len(self.tables["points"]):
                return scores.astype(np.float32)
            signal, length, width = (float(v) for v in self.tables["numbers"])
            x = _scaled(_inputs(kernel, self.tables, rows), scores, length, width)
            found = signal**2 * _similar(x, self.tables["points"].astype(np.float64)) @ self.tables["weights"]
            believed = np.maximum(found, 0.0) + _FASTER * np.minimum(found, 0.0)
            return np.asarray(scores + believed, dtype=np.float32)

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


def adapt_model(model: Scorer | GBDT, kernels: Sequence[Kernel]) -> Adapted:
    """See `adapt`."""
    labelled = [kernel for kernel in kernels if kernel.labelled and kernel.n_configs > 1]
    count = sum(kernel.n_configs for kernel in labelled)
    if count < LEAST_POINTS:
        raise ConfigurationError(f"Adapting needs {LEAST_POINTS} measured configurations at least; there are {count}.")
    labelled = _thinned(labelled, count)
    tables = _layout(labelled)
    x = np.concatenate([_inputs(kernel, tables) for kernel in labelled])
    owner = np.repeat(np.arange(len(labelled)), [kernel.n_configs for kernel in labelled])
    score = np.concatenate([model.score(kernel).astype(np.float64) for kernel in labelled])
    log_runtime = np.concatenate([_above(np.log(kernel.target)) for kernel in labelled])
    return _chosen(model, tables, x, owner, score, log_runtime)


def _chosen(
    model: Scorer | GBDT, tables: dict[str, npt.NDArray[Any]], x: Floats, owner: Any, score: Floats, log_runtime: Floats
) -> Adapted:
    """The candidate that predicts a measurement from the others best, if it is clearly better than the base."""
    width = max(_WIDTH * float(score.std()), 1e-6)
    over = score - score.min()
    same = _LEVEL * (owner[:, None] == owner[None, :]) + _COEFFICIENT**2 * np.outer(over, over)
    importance = np.exp(-_SHARPNESS * log_runtime)
    candidates: list[tuple[float, float, float, Floats]] = []
    for signal in (0.0, *_SIGNALS):
        for length in _LENGTHS if signal else (1.0,):
            points = _scaled(x, score, length, width)
            inverse = np.linalg.inv(same + signal**2 * _similar(points, points) + _NOISE**2 * np.eye(len(x)))
            solved = inverse @ (log_runtime - over)
            left_out = solved / np.diag(inverse)  # what each differs from its prediction by all the others
            error = float((importance * left_out**2).sum() / importance.sum()) ** 0.5
            candidates.append((error, signal, length, solved))
    plain = candidates[0]
    error, signal, length, solved = min(candidates, key=lambda candidate: candidate[0])
    record = {"measurements": len(x), "kernels": int(owner.max()) + 1, "left_out": {"base": plain[0], "adapted": error}}
    if error >= _BETTER * plain[0]:
        tables |= {"points": np.zeros((0, x.shape[1] + 1), np.float32), "weights": np.zeros(0, np.float32)}
        return Adapted(model, tables, record | {"kept": False})
    tables |= {"points": _scaled(x, score, length, width).astype(np.float32), "weights": solved.astype(np.float32)}
    tables["numbers"] = np.array([signal, length, width], np.float32)
    return Adapted(model, tables, record | {"kept": True})


def _thinned(kernels: Sequence[Kernel], count: int) -> list[Kernel]:
    """The same kernels with at most `MOST_POINTS` configurations together; the fastest of each stay."""
    import dataclasses

    share = min(1.0, MOST_POINTS / count)
    thinned = []
    for kernel in kernels:
        rows = np.sort(np.argsort(kernel.target, kind="stable")[: max(2, int(share * kernel.n_configs))])
        cut = {name: getattr(kernel, name)[rows] for name in ("config_feat", "runtime", "normalizer")}
        thinned.append(kernel if share == 1.0 else dataclasses.replace(kernel, **cut))
    return thinned


def _layout(kernels: Sequence[Kernel]) -> dict[str, npt.NDArray[Any]]:
    """Which columns and sizes vary among the measurements, and what makes each as wide as the others."""
    config = np.concatenate([kernel.config_feat for kernel in kernels])
    sizes = np.stack([kernel_sizes(kernel) for kernel in kernels])
    columns = np.flatnonzero(np.ptp(config, axis=0) > 0)
    slots = np.flatnonzero(np.ptp(sizes, axis=0) > 0)
    # Doublings are alike for all that has several values; what has two is a switch, as far apart as one doubling.
    switches = [len(np.unique(config[:, column])) == 2 for column in columns]
    spans = np.ptp(_doublings(config[:, columns]), axis=0)
    scales = np.where(switches, 1.5 / np.maximum(spans, 1e-6), 1.0)
    numbers = np.array([0.0, 1.0, 1.0], np.float32)
    return {"columns": columns, "slots": slots, "scales": scales.astype(np.float32), "numbers": numbers}


def _inputs(
    kernel: Kernel, tables: Mapping[str, npt.NDArray[Any]], rows: npt.NDArray[np.int64] | None = None
) -> Floats:
    config = kernel.config_feat if rows is None else kernel.config_feat[rows]
    own = _doublings(config[:, tables["columns"]]) * tables["scales"]
    wide = _doublings(kernel_sizes(kernel)[tables["slots"]])
    return np.hstack([own, np.broadcast_to(wide, (len(own), len(wide)))])


def _doublings(values: npt.NDArray[Any]) -> Floats:
    doublings: Floats = np.log2(1.0 + np.abs(values.astype(np.float64)))
    return doublings


def _above(values: Floats) -> Floats:
    return np.asarray(values - values.min())


def _scaled(x: Floats, score: Floats, length: float, width: float) -> Floats:
    """Settings and score, each in its own length, so that likeness is a matter of one distance."""
    return np.hstack([x / max(length, 1e-6), score[:, None] / max(width, 1e-6)])


def _similar(a: Floats, b: Floats) -> Floats:
    squared = (a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1)[None, :] - 2 * a @ b.T
    return np.asarray(np.exp(-0.5 * np.maximum(squared, 0.0)))


def load_adapted(path: str | Path) -> Scorer | GBDT | Adapted:
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
    width = tables["columns"].size + tables["slots"].size
    shapes = {
        "points": (tables["weights"].size, width + 1),
        "weights": (tables["weights"].size,),
        "columns": (tables["columns"].size,),
        "slots": (tables["slots"].size,),
        "scales": (tables["columns"].size,),
        "numbers": (3,),
    }
    whole = all(tables[name].dtype.kind in "iu" and (tables[name] >= 0).all() for name in ("columns", "slots"))
    if not whole or any(tables[name].shape != shape for name, shape in shapes.items()):
        raise FileFormatError(f"{path}: the tables of its adaptation do not fit each other; adapt it again.")
