"""Evaluation of models on a split: every metric with its interval, overall and per program.

The table compares each model with random choice, the default configuration, an analytical formula and the noise
ceiling: the error of a model that knows every runtime as precisely as one more measurement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.baselines import Analytical, default_errors, random_errors
from tilewise.costmodel.data.dataset import Dataset, Split, dataset_from_kernels
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.metrics import Estimate, bootstrap, noise_ceiling, repeat_noise
from tilewise.costmodel.ranking import Model
from tilewise.costmodel.training.loop import kernel_metrics, nan_mean, train
from tilewise.errors import ConfigurationError

KS = (1, 5, 10)
_NOISE_KERNELS = 200  # kernels that noise and ceiling are estimated on, to bound the time


@dataclass(frozen=True)
class EvaluationRow:
    """One row of the table: a model or baseline, and each metric with its interval."""

    name: str
    metrics: dict[str, Estimate]
    by_program: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """The complete table; `noise` is the standard deviation of log runtime between repeats, if it is known."""

    split: str
    kernels: int
    configs: int
    rows: list[EvaluationRow]
    noise: float | None
    ceiling: dict[str, float]

    def row(self, name: str) -> EvaluationRow:
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
    # Metrics compare scores with measured runtimes.
    if not kernels.labelled:
        raise ConfigurationError(f"The {split} split has no runtimes to evaluate on.")
    models_by_name = models if isinstance(models, Mapping) else {"model": models}
    rows = [_model_row(name, model, kernels, seed) for name, model in models_by_name.items()]
    if baselines:
        # The formula needs columns whose meaning is known.
        if Analytical.applies(dataset.schema):
            formula = Analytical(dataset.train if len(dataset.train) else kernels)
            rows.append(_model_row("analytical", formula, kernels, seed))
        rows.append(_evaluation_row("default configuration", default_errors(kernels, KS), kernels.programs, seed))
        rows.append(_evaluation_row("random", random_errors(kernels, KS), kernels.programs, seed))
    noise = _measurement_noise(dataset, kernels)
    return Evaluation(split, len(kernels), kernels.n_configs, rows, noise, _noise_ceilings(kernels, noise, seed))


def _model_row(name: str, model: Model, kernels: Split, seed: int) -> EvaluationRow:
    """Score all kernels of a split with a model and summarize its metrics with intervals."""
    metrics = [kernel_metrics(kernel.target, model.score(kernel)) for kernel in kernels]
    columns = {metric: np.array([row[metric] for row in metrics]) for metric in metrics[0]}
    return _evaluation_row(name, columns, kernels.programs, seed)


def _evaluation_row(
    name: str, columns: dict[str, npt.NDArray[np.float64]], programs: list[str], seed: int
) -> EvaluationRow:
    """Compute each metric's mean with interval, overall and by program; `columns` has a value per kernel."""
    kernel_program = np.array(programs)
    columns = columns | {"tile_score": 1.0 - columns["top5"]}
    by_program = {
        program: {metric: nan_mean(values[kernel_program == program].tolist()) for metric, values in columns.items()}
        for program in sorted(set(programs))
    }
    return EvaluationRow(name, {metric: bootstrap(values, seed=seed) for metric, values in columns.items()}, by_program)


def _measurement_noise(dataset: Dataset, kernels: Split) -> float | None:
    """Return the deviation of log runtimes between repeats, recorded or estimated; None if it is unknown."""
    # A collection measured by tilewise records its own noise.
    recorded = dataset.schema.extra.get("noise")
    if isinstance(recorded, int | float) and 0 < recorded < 1:
        return float(recorded)
    sample = kernels[:_NOISE_KERNELS]
    return repeat_noise([kernel.config_feat for kernel in sample], [kernel.target for kernel in sample])


def _noise_ceilings(kernels: Split, noise: float | None, seed: int) -> dict[str, float]:
    """Return the noise ceiling of each top-k error by name: what a perfect model would still lose to noise."""
    if noise is None:
        return {}
    targets = [kernel.target for kernel in kernels[:_NOISE_KERNELS]]
    return {f"top{k}": noise_ceiling(targets, noise, k, seed=seed, draws=10) for k in KS}


def leave_one_program_out(
    dataset: Dataset, model: str = "TileRanker", *, progress: bool = False, **settings: Any
) -> dict[str, dict[str, float]]:
    """Train a model for each program on all other programs.

    Return its metrics on the kernels of the program left out.
    """
    # The test split stays untouched.
    kernels = [*dataset.train, *(dataset.valid if dataset.valid.labelled else [])]
    programs = sorted({kernel.program for kernel in kernels})
    if len(programs) < 3:
        raise ConfigurationError(
            "Leaving a program out needs kernels of at least three programs; this collection has fewer."
        )
    results = {}
    for number, program in enumerate(programs):
        test = [kernel for kernel in kernels if kernel.program == program]
        others = [kernel for kernel in kernels if kernel.program != program]
        # One more program is left out of training to choose the checkpoint.
        train_kernels, valid = _split_program(others, programs[(number + 1) % len(programs)])
        data = dataset_from_kernels(train_kernels, valid, test, dataset.schema)
        trained = train(data, model, progress=progress, **settings)
        metrics = [kernel_metrics(kernel.target, trained.score(kernel)) for kernel in test]
        results[program] = {metric: nan_mean([row[metric] for row in metrics]) for metric in metrics[0]}
    return results


def _split_program(kernels: Sequence[Kernel], program: str) -> tuple[list[Kernel], list[Kernel]]:
    """Split kernels into those of other programs and those of `program`."""
    return [k for k in kernels if k.program != program], [k for k in kernels if k.program == program]
