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
    """A machine of a kind ("cpu", "triton"); `collection` names the collection whose model fits it, if any."""

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
        """Every feasible configuration, the default first."""
        raise NotImplementedError

    def default(self, problem: Problem) -> Config:
        """The analytical default."""
        return self.configs(problem)[0]

    def candidates(self, problem: Problem) -> Sequence[Config]:
        """Configurations considered without measuring, the default first."""
        return self.configs(problem)

    def runs(self, problem: Problem, config: Config) -> bool:
        """True if a candidate is feasible."""
        return True

    def elsewhere(self, problem: Problem, config: Config) -> list[tuple[Problem, Config]]:
        """Other problems that would use a choice too, each with the configuration in which it would."""
        return []

    def trial(self, problem: Problem, default: Config) -> contextlib.AbstractContextManager[Trial]:
        """Open a trial that measures configurations of a problem."""
        raise NotImplementedError

    def confirm(self, problem: Problem, config: Config) -> ConfirmedGain | None:
        """Time a choice and the default again, independently of the search; None if the device does not do that."""
        return None

    def sweep(self, problem: Problem, configs: Sequence[Config]) -> tuple[dict[Config, float], float]:
        """Time every configuration roughly; return nanoseconds, and the seconds that exhaustive tuning takes."""
        raise NotImplementedError

    def forget(self) -> None:
        """Clear caches of compiled kernels."""
