"""Base class of the devices that can be tuned."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tilewise.errors import ConfigurationError
from tilewise.store.problem import Config, Machine, Problem, Value
from tilewise.tune.families.registry import find_family
from tilewise.tune.measure import Trial

if TYPE_CHECKING:
    from tilewise.tune.measure.confirm import ConfirmedGain


class TuningDevice:
    """A machine that problems are tuned on; `collection` names the collection whose model fits it, if any."""

    version: str  # of the software that choices depend on
    margin: float  # log runtime; default of `ModelScores.margin`
    confirmation_seed = 1  # of the operands on which choices are confirmed; the search draws its operands with seed 0
    own_model = True  # False if `collection` was measured on another kind of machine, the nearest there is

    def __init__(self, kind: str, details: Mapping[str, Any], collection: str | None) -> None:
        self.kind, self.collection = kind, collection
        self.machine = Machine(kind, str(details["name"]), details)

    def problem(self, spec: Mapping[str, Value]) -> Problem:
        """Check a problem's specification and fill in its defaults."""
        family = spec.get("family")
        if not isinstance(family, str):
            raise ConfigurationError('A problem is an object with a "family", such as {"family": "matmul", "m": 64}.')
        problem: Problem = find_family(self.kind, family).problem(spec)
        return problem

    def configs(self, problem: Problem) -> Sequence[Config]:
        """List every feasible configuration, the default first."""
        raise NotImplementedError

    def default(self, problem: Problem) -> Config:
        """Return the configuration that runs without tuning."""
        return self.configs(problem)[0]

    def candidates(self, problem: Problem) -> Sequence[Config]:
        """List the configurations that a choice without measuring considers, the default first."""
        return self.configs(problem)

    def runs(self, problem: Problem, config: Config) -> bool:
        """Tell whether a configuration can run this problem."""
        return True

    def elsewhere(self, problem: Problem, config: Config) -> list[tuple[Problem, Config]]:
        """List (problem, configuration) of other problems that would use a choice for this one too."""
        return []

    def trial(self, problem: Problem, default: Config) -> contextlib.AbstractContextManager[Trial]:
        """Open a trial, which measures configurations of a problem."""
        raise NotImplementedError

    def confirm(self, problem: Problem, config: Config) -> ConfirmedGain | None:
        """Compare a choice with the default again, independently of the search; None if not supported."""
        return None

    def sweep(self, problem: Problem, configs: Sequence[Config]) -> tuple[dict[Config, float], float]:
        """Time every configuration roughly; return ns of each, and the seconds of exhaustive tuning."""
        raise NotImplementedError

    def forget(self) -> None:
        """Clear all caches of compiled kernels."""
