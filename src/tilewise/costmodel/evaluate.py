"""How good models are on a split: every metric with its interval, overall and per program, beside the baselines.

The table puts each model beside chance, the default configuration, a formula, and the noise ceiling: the error left to
a model that knew every runtime as well as one more measurement would tell it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.baselines import Analytical, default_errors, random_errors
from tilewise.costmodel.data.dataset import Dataset, dataset_from_kernels
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.shards import Split
from tilewise.costmodel.metrics import Estimate, bootstrap, noise_ceiling, repeat_noise
from tilewise.costmodel.rank import Model
from tilewise.costmodel.train.loop import kernel_metrics, train
from tilewise.errors import ConfigurationError

KS = (1, 5, 10)
_NOISE_KERNELS = 200


@dataclass(frozen=True)
class Row:
    """One line of the table: a model or baseline, and each metric with its interval."""

    name: str
    metrics: dict[str, Estimate]
    by_program: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """The whole table; `noise` is the standard deviation of log runtime between repeats, where it is known."""

    split: str
    kernels: int
    configs: int
    rows: list[Row]
    noise: float | None
    ceiling: dict[str, float]

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(
    models: Mapping[str, Model] | Model,
    dataset: Dataset,
    split: str = "valid",
    *,
    baselines: bool = True,
    seed: int = 0,
) -> Evaluation:
    """Evaluate one or several models on a labelled split.

    >>> evaluate(model, data, "test").row("model").metrics["top5"].mean  # doctest: +SKIP
    0.012
    """
    kernels = dataset.split(split)
    if not kernels.labelled:
        raise ConfigurationError(f"The {split} split has no runtimes to evaluate on.")
    named = models if isinstance(models, Mapping) else {"model": models}
    rows = [_model_row(name, model, kernels, seed) for name, model in named.items()]
    if baselines:
        if Analytical.applies(dataset.schema):
            formula = Analytical(dataset.train if len(dataset.train) else kernels)
            rows.append(_model_row("analytical", formula, kernels, seed))
        rows.append(_baseline_row("default configuration", default_errors(kernels, KS), kernels.programs, seed))
        rows.append(_baseline_row("random", random_errors(kernels, KS, seed), kernels.programs, seed))
    noise = _noise(dataset, kernels)
    return Evaluation(split, len(kernels), kernels.n_configs, rows, noise, _ceiling(kernels, noise, seed))


def _model_row(name: str, model: Model, kernels: Split, seed: int) -> Row:
    found = [kernel_metrics(kernel.target, model.score(kernel)) for kernel in kernels]
    columns = {metric: np.array([row[metric] for row in found]) for metric in found[0]}
    return _row(name, columns | {"tile_score": 1.0 - columns["top5"]}, kernels.programs, seed)


def _baseline_row(name: str, columns: dict[str, npt.NDArray[np.float64]], programs: list[str], seed: int) -> Row:
    return _row(name, columns | {"tile_score": 1.0 - columns["top5"]}, programs, seed)


def _row(name: str, columns: dict[str, npt.NDArray[np.float64]], programs: list[str], seed: int) -> Row:
    of = np.array(programs)
    by_program = {
        program: {metric: _mean(values[of == program]) for metric, values in columns.items()}
        for program in sorted(set(programs))
    }
    return Row(name, {metric: bootstrap(values, seed=seed) for metric, values in columns.items()}, by_program)


def _mean(values: npt.NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _noise(dataset: Dataset, kernels: Split) -> float | None:
    """From the collection's own record where it has one, else from exact repeats of a configuration."""
    recorded = dataset.schema.extra.get("noise")
    if isinstance(recorded, int | float) and 0 < recorded < 1:
        return float(recorded)
    some = kernels[:_NOISE_KERNELS]
    return repeat_noise([kernel.config_feat for kernel in some], [kernel.target for kernel in some])


def _ceiling(kernels: Split, noise: float | None, seed: int) -> dict[str, float]:
    if noise is None:
        return {}
    targets = [kernel.target for kernel in kernels[:_NOISE_KERNELS]]
    return {f"top{k}": noise_ceiling(targets, noise, k, seed=seed, draws=10) for k in KS}


def leave_one_program_out(
    dataset: Dataset, model: str = "TileRanker", *, progress: bool = False, **settings: Any
) -> dict[str, dict[str, float]]:
    """For each program: metrics on its kernels of a model trained on all the others."""
    kernels = [*dataset.train, *(dataset.valid if dataset.valid.labelled else [])]
    programs = sorted({kernel.program for kernel in kernels})
    if len(programs) < 3:
        raise ConfigurationError("Leaving a program out needs kernels of at least three programs.")
    results = {}
    for number, program in enumerate(programs):
        held = [kernel for kernel in kernels if kernel.program == program]
        others = [kernel for kernel in kernels if kernel.program != program]
        inner = _validation_programs(others, programs[(number + 1) % len(programs)])
        data = dataset_from_kernels(*inner, held, dataset.schema)
        trained = train(data, model, progress=progress, **settings)
        found = [kernel_metrics(kernel.target, trained.score(kernel)) for kernel in held]
        results[program] = {metric: _mean(np.array([row[metric] for row in found])) for metric in found[0]}
    return results


def _validation_programs(kernels: Sequence[Kernel], program: str) -> tuple[list[Kernel], list[Kernel]]:
    """The checkpoint is chosen on one more program that is held out of training."""
    return [k for k in kernels if k.program != program], [k for k in kernels if k.program == program]
