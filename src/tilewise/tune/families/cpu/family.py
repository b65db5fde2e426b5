"""The plug-in point of the CPU collector: what a family of native kernels must say about itself.

The same idea as for Triton, with less to say: there is nothing to compile, and the kernel is a Python callable. The
first configuration of `configs` is the default, against which all others are normalised.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.hlo.graph import KernelGraph
from tilewise.errors import ConfigurationError, did_you_mean
from tilewise.tune.problem import Config, Problem, Value

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Expected:
    """The right answer in float64 and how far a result may be from it."""

    value: npt.NDArray[np.float64]
    bound: float


class CpuFamily(Protocol):
    """What a plug-in provides; see docs/adding-a-family.md."""

    name: str

    def problem(self, spec: Mapping[str, Value]) -> Problem:
        """The problem a user's JSON object describes; one sentence if it does not."""

    def configs(self, problem: Problem) -> Sequence[Config]:
        """Every feasible configuration on this machine, the default first."""

    def operands(self, problem: Problem, rng: np.random.Generator) -> Mapping[str, Array]:
        """Fresh random inputs."""

    def expected(self, problem: Problem, operands: Mapping[str, Array]) -> Expected:
        """The answer from NumPy, and the tolerance."""

    def runner(self, problem: Problem, config: Config, operands: Mapping[str, Array]) -> Callable[[], Array]:
        """A callable that runs the kernel once and gives its result."""

    def graph(self, problem: Problem) -> KernelGraph:
        """What is computed, as instructions (tilewise.costmodel.hlo.graph)."""

    def tile(self, problem: Problem, config: Config) -> Mapping[str, Sequence[int]]:
        """`kernel`, `output` and `input` bounds: the tile of the second operand, of the result, of the first."""


_BUILT_IN = {
    "matmul": "matmul:Matmul",
    "batched_matmul": "matmul:BatchedMatmul",
    "conv2d": "conv2d:Conv2d",
    "int8_matmul": "int8_matmul:Int8Matmul",
}
_added: dict[str, CpuFamily] = {}


def add_family(family: CpuFamily) -> None:
    """Register a family of your own; it takes part in `collect cpu --shapes` from then on."""
    _added[family.name] = family


def family_names() -> list[str]:
    return [*_BUILT_IN, *_added]


@functools.cache
def _built_in(name: str) -> CpuFamily:
    module, cls = _BUILT_IN[name].split(":")
    family: CpuFamily = getattr(importlib.import_module(f"tilewise.tune.families.cpu.{module}"), cls)()
    return family


def get_family(name: str) -> CpuFamily:
    if name in _added:
        return _added[name]
    if name not in _BUILT_IN:
        raise ConfigurationError(f"There is no CPU kernel family {name!r}; {did_you_mean(name, family_names())}")
    return _built_in(name)
