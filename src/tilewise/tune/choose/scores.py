"""A cost model's scores for the configurations of a problem, and how far to trust them.

`ModelScores` turns a problem and its configurations into the kernel that a cost model reads (its graph, its columns).
Beside the scores it holds the hyperparameters of the process that corrects them while measuring, and the margin that a
promise over the default has to exceed to be taken unmeasured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import TILE_FEATURES
from tilewise.costmodel.models.scorer import load_scorer
from tilewise.costmodel.models.shipped import shipped_file
from tilewise.costmodel.models.trained import model_path
from tilewise.costmodel.rank import Model
from tilewise.errors import TilewiseError, UnavailableError
from tilewise.store.problem import Config, Problem
from tilewise.tune.families.columns import with_machine
from tilewise.tune.families.registry import Family, find_family
from tilewise.tune.families.space import space_of
from tilewise.tune.search.calibration import load_calibration
from tilewise.tune.search.gaussian_process import Hyperparameters, Numbers

# In logarithms of runtime, for a CPU's model that says nothing else: promises below it are as often broken as kept.
MARGIN = 0.045
_UNCALIBRATED = Hyperparameters(0.5, 0.25, 0.15, 2.0, 0.05, 0.01, far=0.0, near=0.0)


@dataclass(eq=False)
class ModelScores:
    """A model and what it reads; `notes` is what the user should hear once."""

    model: Model
    hyper: Hyperparameters
    name: str  # of the model, for choices' sake
    columns: tuple[str, ...] = ()
    kind: str = "cpu"  # whose families it scores
    margin: float = MARGIN  # what a choice must promise over the default, in log runtime, to be taken unmeasured
    notes: list[str] = field(default_factory=list)
    machine: Mapping[str, int] = field(default_factory=dict)  # the columns that tell a model of the machine

    def scores(self, problem: Problem, configs: Sequence[Config]) -> Numbers:
        """One score a configuration, lower is faster; the first configuration is the default."""
        family, own = find_family(self.kind, problem.family), self.columns[len(TILE_FEATURES) :]
        kernel = as_kernel(family, problem, configs, own, self.machine)
        return np.asarray(self.model.score(kernel), dtype=np.float64)


@dataclass(frozen=True, eq=False)
class FixedScores:
    """Scores of one problem that are already computed, in the order of its configurations."""

    hyper: Hyperparameters
    values: Numbers
    margin: float = 0.0

    def scores(self, problem: Problem, configs: Sequence[Config]) -> Numbers:
        """Return the scores, lower is faster."""
        return self.values


def as_kernel(
    family: Family,
    problem: Problem,
    configs: Sequence[Config],
    own: Sequence[str],
    machine: Mapping[str, int] | None = None,
    default: Config | None = None,
) -> Kernel:
    """The kernel a cost model reads; its runtimes are withheld. The default is the first unless it is named."""
    rows = space_of(configs).rows(family, problem, own)
    if machine:
        first = 0 if default is None else configs.index(default) if default in configs else None
        rows = with_machine(rows, own, problem, machine, first)
    nothing = np.zeros(len(configs), np.int64)
    # Not copied, as `make_kernel` would: a model knows the list by its array.
    return Kernel(problem.family, problem.family, *family.graph(problem), rows, nothing, nothing)


def shipped_scores(
    collection: str | None, hardware: str, kind: str = "cpu", margin: float = MARGIN, *, own: bool = True
) -> tuple[ModelScores | None, str]:
    """The model shipped for a collection; or none, and a line that says so. `own`: the collection was measured on such
    hardware."""
    try:
        if collection is not None:
            found = file_scores(shipped_file(collection), kind, margin)
            if not own:
                found.notes.append(
                    f"no model was trained on {hardware}: starting from that of {collection}, the nearest there is; "
                    "what is measured here corrects it, and `tilewise tiles adapt` keeps that."
                )
            return found, ""
        reason = f"no trained model is shipped for {hardware}"
    except UnavailableError as error:
        reason = str(error).rstrip(".")
    return None, f"{reason}: starting from the analytical choice, and learning from what is measured."


def file_scores(path: str | Path, kind: str = "cpu", margin: float = MARGIN) -> ModelScores:
    """A model file and the calibration beside it, for families of `kind`; `margin` where the model names none."""
    found = model_path(path)
    model: Any = load_scorer(found)
    hyper, notes = load_calibration(found), []
    if hyper is None:
        hyper = dataclasses.replace(_UNCALIBRATED, by_score=kind != "cpu")
        notes.append(
            f"{found.name} comes without a calibration: the tuner uses a general one. "
            f"`tilewise replay COLLECTION --model {found} --calibrate` makes one of the collection it learned from."
        )
    columns = tuple(model.schema.config_features)
    if columns[: len(TILE_FEATURES)] != TILE_FEATURES:
        raise TilewiseError(f"{found.name} was trained on other configuration columns than the tuner has.")
    margin = float(getattr(model, "record", {}).get("margin", margin))
    return ModelScores(model, hyper, found.stem, columns, kind, margin, notes, _machine(columns))


def _machine(columns: Sequence[str]) -> Mapping[str, int]:
    """This machine's columns, for a model that was trained with such."""
    if not any(name.startswith("machine_") for name in columns):
        return {}
    from tilewise.costmodel.features.machine import machine_features

    return machine_features()
