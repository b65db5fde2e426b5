"""The plug-in interface of the CPU collector: families of native kernels.

It is simpler than the interface for Triton: nothing is compiled, and the kernel is a Python callable. The first
configuration of `configs` is the default; runtimes are relative to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tilewise.store.problem import Config, Problem
from tilewise.tune.families import registry
from tilewise.tune.families.registry import Expected, Family

Array = npt.NDArray[Any]


class CpuFamily(Family, Protocol):
    """Interface of a CPU family; see docs/adding-a-family.md."""

    def operands(self, problem: Problem, rng: np.random.Generator) -> Mapping[str, Array]:
        """Draw random inputs."""

    def expected(self, problem: Problem, operands: Mapping[str, Array]) -> Expected:
        """Compute the result with NumPy, and its tolerance."""

    def runner(self, problem: Problem, config: Config, operands: Mapping[str, Array]) -> Callable[[], Array]:
        """Return a callable that runs the kernel once and returns its result."""


def is_right(result: Array, expected: Expected) -> bool:
    """True if a result is within its tolerance; NaN never is."""
    same_shape = result.shape == expected.value.shape
    return same_shape and bool((np.abs(result - expected.value) <= expected.bound).all())


add_family, family_names = partial(registry.add_family, "cpu"), partial(registry.family_names, "cpu")


def get_family(name: str) -> CpuFamily:
    """Return a CPU family by name."""
    family: CpuFamily = registry.find_family("cpu", name)
    return family


__all__ = ["Array", "CpuFamily", "Expected", "add_family", "family_names", "get_family", "is_right"]
