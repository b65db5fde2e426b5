"""The plug-in point of the CPU collector: what a family of native kernels must say about itself.

The same idea as for Triton, with less to say: there is nothing to compile, and the kernel is a Python callable. The
first configuration of `configs` is the default, against which all others are normalised.
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
    """What a plug-in provides; see docs/adding-a-family.md."""

    def operands(self, problem: Problem, rng: np.random.Generator) -> Mapping[str, Array]:
        """Fresh random inputs."""

    def expected(self, problem: Problem, operands: Mapping[str, Array]) -> Expected:
        """The answer from NumPy, and the tolerance."""

    def runner(self, problem: Problem, config: Config, operands: Mapping[str, Array]) -> Callable[[], Array]:
        """A callable that runs the kernel once and gives its result."""


def is_right(result: Array, expected: Expected) -> bool:
    """Whether it is within bounds; a NaN is within none."""
    same = result.shape == expected.value.shape
    return same and bool((np.abs(result - expected.value) <= expected.bound).all())


add_family, family_names = partial(registry.add_family, "cpu"), partial(registry.family_names, "cpu")


def get_family(name: str) -> CpuFamily:
    family: CpuFamily = registry.find_family("cpu", name)
    return family


__all__ = ["Array", "CpuFamily", "Expected", "add_family", "family_names", "get_family", "is_right"]
