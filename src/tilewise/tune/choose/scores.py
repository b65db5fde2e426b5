"""A cost model's scores for the configurations of a problem, and their reliability.

`ModelScores` turns a problem and its configurations into the kernel that a cost model reads (its graph, its columns).
It also has the hyperparameters of the Gaussian process that corrects the scores during measurement, and the margin: the
predicted gain over the default that an unmeasured choice must exceed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import TILE_FEATURES
from tilewise.costmodel.models.files import model_path, shipped_file
from tilewise.costmodel.models.scorer import load_scorer
from tilewise.errors import TilewiseError, UnavailableError
from tilewise.store.problem import Config, Problem
from tilewise.tune.choose.decide import Scores
from tilewise.tune.families.registry import Family, find_family
from tilewise.tune.families.space import space_of, with_machine
from tilewise.tune.search.confidence import load_calibration
from tilewise.tune.search.gaussian_process import Hyperparameters, Numbers

if TYPE_CHECKING:
    from tilewise.costmodel.ranking import Model

# Log runtime. Default for CPU models without a fitted margin: smaller predicted gains are wrong half of the time.
MARGIN = 0.045
# Prior for models without a calibration; arbitrary, more cautious than the fitted ones.
_UNCALIBRATED = Hyperparameters(
    coefficient=0.5,
    coefficient_deviation=0.25,
    signal=0.15,
    length_scale=2.0,
    nugget=0.05,
    noise=0.01,
    far=0.0,
    near=0.0,
)

UNCALIBRATED_GPU = dataclasses.replace(_UNCALIBRATED, by_score=True)  # GPU candidates are measured in score order


@dataclass(eq=False)
class ModelScores:
    """A cost model and its inputs; `notes` are messages for the user."""

    model: Model
    hyper: Hyperparameters
    name: str  # of the model; recorded with each run
    columns: tuple[str, ...] = ()
    kind: str = "cpu"  # device whose families it scores
    margin: float = MARGIN  # log runtime; predicted gain that an unmeasured choice must exceed
    notes: list[str] = field(default_factory=list)
    machine: Mapping[str, int] = field(default_factory=dict)  # values of the columns that describe the machine

    def scores(self, problem: Problem, configs: Sequence[Config]) -> Numbers:
        """Return one score per configuration, lower is faster; the first configuration is the default."""
        family, extra_columns = find_family(self.kind, problem.family), self.columns[len(TILE_FEATURES) :]
        kernel = as_kernel(family, problem, configs, extra_columns, self.machine)
        return np.asarray(self.model.score(kernel), dtype=np.float64)

    def rank(self, problem: Problem, configs: Sequence[Config]) -> Scores:
        """Return a problem's scores as `decide` takes them, with the model's margin."""
        return Scores(self.hyper, self.scores(problem, configs), self.margin)


def as_kernel(
    family: Family,
    problem: Problem,
    configs: Sequence[Config],
    extra_columns: Sequence[str],
    machine: Mapping[str, int] | None = None,
    default: Config | None = None,
) -> Kernel:
    """Build the cost model's input for a problem's configurations; the first is the default unless one is given."""
    rows = space_of(configs).rows(family, problem, extra_columns)
    if machine:
        first = 0 if default is None else configs.index(default) if default in configs else None
        rows = with_machine(rows, extra_columns, problem, machine, first)
    no_runtimes = np.zeros(len(configs), np.int64)
    # `make_kernel` would copy the rows, but models cache their features by the identity of this array.
    return Kernel(problem.family, problem.family, *family.graph(problem), rows, no_runtimes, no_runtimes)


def shipped_scores(
    collection: str | None, hardware: str, kind: str = "cpu", margin: float = MARGIN, *, own: bool = True
) -> tuple[ModelScores | None, str]:
    """Load the shipped model of a collection of measurements.

    Returns (scores, ""), or (None, why there is no model and what is done instead). `margin` is the predicted gain over
    the default from which a configuration is chosen without measuring. `own` is True if the collection was measured on
    this kind of hardware.
    """
    try:
        if collection is not None:
            scores = file_scores(shipped_file(collection), kind, margin)
            if not own:
                scores.hyper = scores.hyper.elsewhere()
                scores.notes.append(
                    f"no model was trained on {hardware}: starting from that of {collection}, the nearest there is; "
                    "what is measured here corrects it."
                )
            return scores, ""
        reason = f"no trained model is shipped for {hardware}"
    except UnavailableError as error:
        reason = str(error).rstrip(".")
    return None, f"{reason}: starting from the analytical choice, and learning from what is measured."


def file_scores(path: str | Path, kind: str = "cpu", margin: float = MARGIN) -> ModelScores:
    """Load a model file with its calibration, for kernel families of `kind` ("cpu" or "triton")."""
    file = model_path(path)
    model: Any = load_scorer(file)
    hyper, notes = load_calibration(file), []
    if hyper is None:
        hyper = dataclasses.replace(_UNCALIBRATED, by_score=kind != "cpu")
        notes.append(
            f"{file.name} comes without a calibration: the tuner uses a general one. "
            f"`tilewise tiles replay COLLECTION --model {file} --calibrate` makes one from its training collection."
        )
    columns = tuple(model.schema.config_features)
    if columns[: len(TILE_FEATURES)] != TILE_FEATURES:
        raise TilewiseError(f"{file.name} was trained on other configuration columns than the tuner has.")
    machine: Mapping[str, int] = {}
    if any(name.startswith("machine_") for name in columns):
        from tilewise.tune.measure.cpu.clock import machine_features

        machine = machine_features()
    margin = float(getattr(model, "record", {}).get("margin", margin))
    return ModelScores(model, hyper, file.stem, columns=columns, kind=kind, margin=margin, notes=notes, machine=machine)
