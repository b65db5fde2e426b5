"""The tuner's guide: scores for the configurations of a problem, from a trained model or from nothing.

`Guide` turns a problem and its configurations into the kernel that a cost model reads (its graph, its columns), and
hands out scores, the prior that says how far to trust them, and the rule for stopping. Without a model for the hardware
at hand the scores are all equal, except that the default, which comes first, is tried first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import TILE_FEATURES
from tilewise.costmodel.models.scorer import load_scorer
from tilewise.costmodel.models.shipped import shipped_file
from tilewise.costmodel.models.trained import model_path
from tilewise.costmodel.rank import Model
from tilewise.errors import TilewiseError, UnavailableError
from tilewise.tune.families.space import space_of
from tilewise.tune.measure.export import Described, told
from tilewise.tune.problem import Config, Problem
from tilewise.tune.search.calibration import Calibration, load_calibration
from tilewise.tune.search.gaussian_process import BLIND, Belief, Memory, Numbers, Prior
from tilewise.tune.search.loop import Rule

_BLIND_RULE = Rule(gain=0.02, sure=0.0)
_UNCALIBRATED = Calibration(Prior(slope=0.5, slope_error=0.25, spread=0.15, own=0.05), Rule(gain=0.05, sure=0.0))
# In logarithms of runtime, for a model that says nothing else: promises below it are as often broken as kept.
MARGIN = 0.045
# In doublings, a setting that is on or off counts as one; sizes count as they are.
_DEFAULT_LEAD = 0.05


@dataclass(eq=False)
class Guide:
    """What to believe before measuring. `notes` is what the user should hear once."""

    model: Model | None
    prior: Prior
    rule: Rule
    name: str  # of the model, for choices' sake; "" without one
    columns: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    machine: Mapping[str, int] = field(default_factory=dict)  # the columns that tell a model of the machine

    @property
    def margin(self) -> float:
        """What a choice has to promise over the default, in logarithms of runtime, to be taken unmeasured."""
        return float(getattr(self.model, "record", {}).get("margin", MARGIN))

    @property
    def error(self) -> float | None:
        """How far a promise over the default is off, in logarithms (one deviation), where the model says so."""
        found = getattr(self.model, "record", {}).get("error")
        return None if found is None else float(found)

    def scores(self, family: Described, problem: Problem, configs: Sequence[Config]) -> Numbers:
        """One score a configuration, lower is faster; the first configuration is the default."""
        if self.model is None:
            blind = np.full(len(configs), _DEFAULT_LEAD)
            blind[:1] = 0.0
            return blind
        kernel = as_kernel(family, problem, configs, self.columns[len(TILE_FEATURES) :], self.machine)
        return np.asarray(self.model.score(kernel), dtype=np.float64)

    def belief(
        self,
        scores: Numbers,
        configs: Sequence[Config],
        memory: Memory | None = None,
        problem: Problem | None = None,
    ) -> Belief:
        sizes = shape_fields(problem) if problem and memory is not None else None
        belief = Belief(scores, space_of(configs).scaled(self.prior), self.prior, memory, sizes)
        belief.start_with = 0 if self.model is None and memory is None else None
        return belief

    def first(self, scores: Numbers, configs: Sequence[Config], memory: Memory | None, problem: Problem) -> int:
        """The choice without measuring: the best score, unless other shapes that were measured here say otherwise."""
        if memory is None:
            return int(np.argmin(scores))
        return self.belief(scores, configs, memory, problem).portfolio(1)[0]


def as_kernel(
    family: Described,
    problem: Problem,
    configs: Sequence[Config],
    own: Sequence[str],
    machine: Mapping[str, int] | None = None,
    default: Config | None = None,
) -> Kernel:
    """The kernel a cost model reads; its runtimes are withheld. The default is the first unless it is named."""
    rows = space_of(configs).rows(family, problem, own)
    if machine:
        first = configs.index(default) if default in configs else 0 if default is None else None
        rows = told(rows, own, problem, machine, first)
    nothing = np.zeros(len(configs), np.int64)
    # Not copied, as `make_kernel` would: a model knows the list by its array.
    return Kernel(f"{problem.family}_{problem.digest}", problem.family, *family.graph(problem), rows, nothing, nothing)


def shape_fields(problem: Problem) -> Numbers:
    """A problem's sizes in doublings; words as numbers that differ."""
    return np.array([_size(value) for name, value in problem.items() if name != "family"])


def _size(value: int | str) -> float:
    if isinstance(value, int):
        return float(np.log2(1 + abs(value)))
    return float(sum(ord(letter) * (place + 1) for place, letter in enumerate(value)) % 97) / 24.0


def shipped_guide(collection: str | None, hardware: str) -> Guide:
    """The guide for a machine: the model shipped for `collection`, or none, which is said."""
    if collection is None:
        return _blind(f"no trained model is shipped for {hardware}")
    try:
        return file_guide(shipped_file(collection))
    except UnavailableError as error:
        return _blind(str(error).rstrip("."))


def _blind(reason: str) -> Guide:
    note = f"{reason}: starting from the analytical choice, and learning from what is measured."
    return Guide(None, BLIND, _BLIND_RULE, "", notes=[note])


def file_guide(path: str | Path) -> Guide:
    """The guide made of a model file and the calibration beside it."""
    found = model_path(path)
    model: Any = load_scorer(found)
    calibration = load_calibration(found)
    notes = []
    if calibration is None:
        calibration = _UNCALIBRATED
        notes.append(
            f"{found.name} comes without a calibration: the tuner uses a general one and is never sure. "
            f"`tilewise replay COLLECTION --model {found} --calibrate` makes one of the collection it learned from."
        )
    columns = tuple(model.schema.config_features)
    if columns[: len(TILE_FEATURES)] != TILE_FEATURES:
        raise TilewiseError(f"{found.name} was trained on other configuration columns than the tuner has.")
    return Guide(model, calibration.prior, calibration.rule, found.stem, columns, notes, _machine(columns))


def _machine(columns: Sequence[str]) -> Mapping[str, int]:
    """This machine's columns, for a model that was trained with such."""
    if not any(name.startswith("machine_") for name in columns):
        return {}
    from tilewise.tune.measure.cpu.features import machine_features

    return machine_features()


class Recollection:
    """Problems of one family that were measured on this machine, as the belief remembers them: the nearest few, and at
    most so many measurements in all. What the guide said of each is worked out once."""

    def __init__(
        self,
        guide: Guide,
        family: Described,
        measured: Mapping[Problem, Mapping[Config, float]],
        configs_of: Callable[[Problem], Sequence[Config]],
        most_shapes: int = 6,
        most_rows: int = 160,
    ) -> None:
        self._guide, self._family, self._measured, self._configs_of = guide, family, measured, configs_of
        self._most_shapes, self._most_rows = most_shapes, most_rows
        self._told: dict[Problem, tuple[Numbers, Numbers, Numbers] | None] = {}

    def near(self, problem: Problem) -> Memory | None:
        """What to remember for a problem; None where there is nothing."""
        here = shape_fields(problem)
        others = [p for p in self._measured if p != problem and set(p) == set(problem) and p.family == problem.family]
        others.sort(key=lambda p: (float(np.square(shape_fields(p) - here).sum()), p.key))
        parts: list[tuple[npt.NDArray[np.int64], Numbers, Numbers, Numbers, Numbers]] = []
        for number, other in enumerate(others[: self._most_shapes]):
            if other not in self._told:
                self._told[other] = self._tell(other)
            told = self._told[other]
            if told is not None:
                count = len(told[0])
                parts.append((np.full(count, number), np.tile(shape_fields(other), (count, 1)), *told))
        if not parts:
            return None
        return Memory(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def _tell(self, other: Problem) -> tuple[Numbers, Numbers, Numbers] | None:
        """Settings, scores and log runtimes; None of a problem of which too little is known."""
        times = list(self._measured[other].items())[: self._most_rows // self._most_shapes]
        every = self._configs_of(other)
        place = {config: index for index, config in enumerate(every)}
        known = [(config, ns) for config, ns in times if config in place]
        if len(known) < 2:
            return None
        rows = [place[config] for config, _ in known]
        scores = self._guide.scores(self._family, other, every)
        settings = space_of(every).scaled(self._guide.prior)
        return settings[rows], scores[rows] - scores.min(), np.log([ns for _, ns in known])
