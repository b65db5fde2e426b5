"""Families by device and name: those that come with tilewise, loaded when they are asked for, and those that plug-ins
add. What every family says of itself, whatever it runs on, is `Family`; `cpu/family.py` and `triton/family.py` add what
running takes.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tilewise.costmodel.hlo.graph import KernelGraph
from tilewise.errors import ConfigurationError, FileFormatError, did_you_mean
from tilewise.store.problem import Config, Problem, Value


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


# What makes each family, in a module under `families` or elsewhere.
_BUILT_IN: Mapping[str, Mapping[str, str]] = {
    "cpu": {
        "matmul": "cpu.matmul:Matmul",
        "batched_matmul": "cpu.matmul:batched_matmul",
        "conv2d": "cpu.conv2d:Conv2d",
        "int8_matmul": "cpu.int8_matmul:Int8Matmul",
    },
    "triton": {
        "matmul": "tilewise.gpu.families.matmul:TritonMatmul",
        "batched_matmul": "tilewise.gpu.families.matmul:batched_matmul",
        "product": "tilewise.gpu.products.family:ProductFamily",
        "attention": "tilewise.gpu.families.attention:TritonAttention",
        "softmax": "tilewise.gpu.families.rowwise:softmax",
        "layer_norm": "tilewise.gpu.families.rowwise:layer_norm",
        "rms_norm": "tilewise.gpu.families.rowwise:rms_norm",
        "reduction": "tilewise.gpu.families.rowwise:TritonReduction",
    },
}
_WORDS = {"cpu": "CPU", "triton": "Triton"}
_loaded: dict[tuple[str, str], Any] = {}


def add_family(kind: str, family: Family) -> None:
    """Register a family of your own; it takes part in `tilewise collect --shapes` from then on."""
    _loaded[kind, family.name] = family


def family_names(kind: str) -> list[str]:
    return list(dict.fromkeys([*_BUILT_IN[kind], *(name for device, name in _loaded if device == kind)]))


def find_family(kind: str, name: str) -> Any:
    """The family `name` for devices of `kind`, as stores record it."""
    kind = "triton" if kind.startswith("triton") else kind
    if kind not in _BUILT_IN:
        raise FileFormatError(f"Measurements of kind {kind!r} are unknown to this tilewise; a newer one wrote them.")
    if (kind, name) not in _loaded:
        if name not in _BUILT_IN[kind]:
            near = did_you_mean(name, family_names(kind))
            raise ConfigurationError(f"There is no {_WORDS[kind]} kernel family {name!r}; {near}")
        module, make = _BUILT_IN[kind][name].split(":")
        place = module if module.startswith("tilewise.") else f"tilewise.tune.families.{module}"
        _loaded[kind, name] = getattr(importlib.import_module(place), make)()
    return _loaded[kind, name]
