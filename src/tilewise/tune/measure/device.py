"""What every machine to tune on has: families by name, problems from a user's JSON, a collection whose model fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from tilewise.errors import ConfigurationError
from tilewise.tune.choose.scores import Guide
from tilewise.tune.measure.store import Machine
from tilewise.tune.problem import Config, Problem, Value
from tilewise.tune.search.gaussian_process import Numbers, Prior


class ReadsProblems(Protocol):
    """The part of a family that a bench needs."""

    def problem(self, spec: Mapping[str, Value]) -> Problem: ...


Family = TypeVar("Family", bound=ReadsProblems)


class FamilyBench(Generic[Family]):
    """A machine of `kind` whose families `get_family` knows; `collection` is the one measured on its like, if any."""

    def __init__(
        self, kind: str, details: Mapping[str, Any], get_family: Callable[[str], Family], collection: str | None
    ) -> None:
        self.kind, self.collection = kind, collection
        self.machine = Machine(kind, str(details["name"]), details)
        self._get_family = get_family

    def family(self, name: str) -> Family:
        return self._get_family(name)

    def problem(self, spec: Mapping[str, Value]) -> Problem:
        family = spec.get("family")
        if not isinstance(family, str):
            raise ConfigurationError('A problem is an object with a "family", such as {"family": "matmul", "m": 64}.')
        return self._get_family(family).problem(spec)

    def configs(self, problem: Problem) -> Sequence[Config]:
        """Every feasible configuration, the default first."""
        raise NotImplementedError

    def default(self, problem: Problem) -> Config:
        return self.configs(problem)[0]

    def first_choice(self, problem: Problem, guide: Guide) -> tuple[bool, Config | None]:
        """Whether there is a shorter way than ranking all to what to take unmeasured; and what: None, the default."""
        return False, None

    def elsewhere(self, problem: Problem, config: Config) -> list[tuple[Problem, Config]]:
        """Other problems that a choice would be used for, as it would be used there."""
        return []

    def start(self, problem: Problem, configs: Sequence[Config]) -> tuple[Numbers, Prior] | None:
        """Scores to start measuring from where no model knows this machine, and how far to trust them."""
        return None

    def opinion(self, problem: Problem, configs: Sequence[Config]) -> tuple[Numbers, Prior] | None:
        """Scores to start measuring from, and how far to trust them, where there are better than a ranking's."""
        return None
