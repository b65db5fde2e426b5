"""What every device to tune on has: families by name, problems from a user's JSON, a collection whose model fits."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from tilewise.errors import ConfigurationError
from tilewise.store.problem import Config, Problem, Value
from tilewise.store.store import Machine
from tilewise.tune.families.registry import find_family
from tilewise.tune.measure.trial import Trial


class Device:
    """A machine of `kind`, which its families know it by; `collection` is the one whose model fits, if any."""

    version: str  # what a choice depends on beside the machine
    margin: float  # promises over the default below it are a model's noise, where it says nothing else
    own_model = True  # whether `collection` was measured on such a machine, not only on the nearest

    def __init__(self, kind: str, details: Mapping[str, Any], collection: str | None) -> None:
        self.kind, self.collection = kind, collection
        self.machine = Machine(kind, str(details["name"]), details)

    def problem(self, spec: Mapping[str, Value]) -> Problem:
        family = spec.get("family")
        if not isinstance(family, str):
            raise ConfigurationError('A problem is an object with a "family", such as {"family": "matmul", "m": 64}.')
        problem: Problem = find_family(self.kind, family).problem(spec)
        return problem

    def configs(self, problem: Problem) -> Sequence[Config]:
        """Every feasible configuration, the default first."""
        raise NotImplementedError

    def default(self, problem: Problem) -> Config:
        return self.configs(problem)[0]

    def candidates(self, problem: Problem) -> Sequence[Config]:
        """Those that an unmeasured choice is made among, the default first."""
        return self.configs(problem)

    def runs(self, problem: Problem, config: Config) -> bool:
        """Whether a candidate is feasible."""
        return True

    def elsewhere(self, problem: Problem, config: Config) -> list[tuple[Problem, Config]]:
        """Other problems that a choice would be used for, as it would be used there."""
        return []

    def trial(self, problem: Problem, default: Config) -> contextlib.AbstractContextManager[Trial]:
        """Something to measure configurations of a problem with."""
        raise NotImplementedError

    def sweep(self, problem: Problem, configs: Sequence[Config]) -> tuple[dict[Config, float], float]:
        """Every configuration, roughly: nanoseconds, and the seconds that tuning exhaustively takes."""
        raise NotImplementedError

    def forget(self) -> None:
        """As if nothing had ever been compiled."""
