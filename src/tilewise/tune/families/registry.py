"""Families by name: those that come with tilewise, loaded when they are asked for, and those that plug-ins add.

There is a registry for each kind of device, as a family knows how its kernel runs there. What every family says of
itself, whatever it runs on, is `Family`; `cpu/family.py` and `triton/family.py` add what running takes.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from tilewise.costmodel.hlo.graph import KernelGraph
from tilewise.errors import ConfigurationError, FileFormatError, did_you_mean
from tilewise.tune.problem import Config, Problem, Value


class Family(Protocol):
    """What every family says of itself; see docs/adding-a-family.md."""

    name: str

    def problem(self, spec: Mapping[str, Value]) -> Problem:
        """The problem a user's JSON object describes; one sentence if it does not."""

    def configs(self, problem: Problem) -> Sequence[Config]:
        """Every feasible configuration, the default first."""

    def graph(self, problem: Problem) -> KernelGraph:
        """What is computed, as instructions (tilewise.costmodel.hlo.graph)."""

    def tile(self, problem: Problem, config: Config) -> Mapping[str, Sequence[int]]:
        """`kernel`, `output` and `input` bounds: the tile of the second operand, of the result, of the first."""


@dataclass(frozen=True, eq=False)
class Expected:
    """The right answer and how far a result may be from it: as a whole, or element by element."""

    value: Any
    bound: Any


F = TypeVar("F", bound=Family)


class Registry(Generic[F]):
    """The families of one kind of device; `built_in` names a module and a class of each."""

    def __init__(self, kind: str, built_in: Mapping[str, str]) -> None:
        self.kind, self._built_in = kind, built_in
        self._loaded: dict[str, F] = {}

    def add(self, family: F) -> None:
        """Register a family of your own; it takes part in `tilewise collect --shapes` from then on."""
        self._loaded[family.name] = family

    def names(self) -> list[str]:
        return list(dict.fromkeys([*self._built_in, *self._loaded]))

    def get(self, name: str) -> F:
        if name not in self._loaded:
            if name not in self._built_in:
                near = did_you_mean(name, self.names())
                raise ConfigurationError(f"There is no {self.kind} kernel family {name!r}; {near}")
            module, cls = self._built_in[name].split(":")
            self._loaded[name] = getattr(importlib.import_module(f"tilewise.tune.families.{module}"), cls)()
        return self._loaded[name]


def find_family(kind: str, name: str) -> Any:
    """The family `name` for devices of `kind`, as stores record it."""
    if kind.startswith("triton"):
        from tilewise.tune.families.triton.family import get_family

        return get_family(name)
    if kind == "cpu":
        from tilewise.tune.families.cpu.family import get_family as get_cpu_family

        return get_cpu_family(name)
    raise FileFormatError(f"Measurements of kind {kind!r} are unknown to this tilewise; a newer one wrote them.")
