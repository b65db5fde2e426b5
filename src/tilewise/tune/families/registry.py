"""Registry of kernel families by device and name: built-in families, loaded on first use, and those of plug-ins.

`Family` is the interface that is common to all devices; `cpu/family.py` and `gpu/families/family.py` add the methods
that run a kernel.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tilewise.errors import ConfigurationError, FileFormatError, did_you_mean
from tilewise.store.problem import Config, Problem, Value

if TYPE_CHECKING:
    from tilewise.costmodel.hlo.graph import KernelGraph


class Family(Protocol):
    """Interface of a kernel family; see docs/adding-a-family.md."""

    name: str

    def problem(self, spec: Mapping[str, Value]) -> Problem:
        """Check and complete a user's JSON object; raise ConfigurationError if it is invalid."""

    def configs(self, problem: Problem) -> Sequence[Config]:
        """List every feasible configuration, the default first."""

    def graph(self, problem: Problem) -> KernelGraph:
        """Describe the computation as HLO instructions, for the cost model."""

    def tile(self, problem: Problem, config: Config) -> Mapping[str, Sequence[int]]:
        """Return a configuration's tile sizes by tensor: `kernel` (second operand), `output`, `input` (first)."""


@dataclass(frozen=True, eq=False)
class Expected:
    """A correct result and its tolerance, a scalar or one per element."""

    value: Any
    bound: Any


# Factory of each family, in a module relative to `families` or absolute.
_BUILT_IN: Mapping[str, Mapping[str, str]] = {
    "cpu": {
        "matmul": "cpu.matmul:Matmul",
        "batched_matmul": "cpu.matmul:batched_matmul",
        "conv2d": "cpu.conv2d:Conv2dFamily",
        "int8_matmul": "cpu.int8_matmul:Int8Matmul",
    },
    "triton": {
        "matmul": "tilewise.gpu.families.matmul:TritonMatmul",
        "batched_matmul": "tilewise.gpu.families.matmul:batched_matmul",
        "product": "tilewise.gpu.products.family:ProductFamily",
        "grouped_matmul": "tilewise.gpu.families.grouped:GroupedMatmul",
        "block_fp8_matmul": "tilewise.gpu.families.grouped:block_fp8_matmul",
        "attention": "tilewise.gpu.families.attention:TritonAttention",
        "softmax": "tilewise.gpu.families.rowwise:softmax",
        "layer_norm": "tilewise.gpu.families.rowwise:layer_norm",
        "rms_norm": "tilewise.gpu.families.rowwise:rms_norm",
        "reduction": "tilewise.gpu.families.rowwise:TritonReduction",
    },
}
_DEVICE_NAMES = {"cpu": "CPU", "triton": "Triton"}
_loaded: dict[tuple[str, str], Any] = {}


def add_family(kind: str, family: Family) -> None:
    """Register a kernel family for a kind of device ("cpu" or "triton")."""
    _loaded[kind, family.name] = family


def family_names(kind: str) -> list[str]:
    """List the names of all families for a kind of device ("cpu" or "triton")."""
    return list(dict.fromkeys([*_BUILT_IN[kind], *(name for device, name in _loaded if device == kind)]))


def find_family(kind: str, name: str) -> Any:
    """Return the family `name` for a kind of device ("cpu" or "triton")."""
    kind = "triton" if kind.startswith("triton") else kind
    if kind not in _BUILT_IN:
        raise FileFormatError(f"Measurements of kind {kind!r} are unknown to this tilewise; a newer one wrote them.")
    if (kind, name) not in _loaded:
        if name not in _BUILT_IN[kind]:
            hint = did_you_mean(name, family_names(kind))
            raise ConfigurationError(f"There is no {_DEVICE_NAMES[kind]} kernel family {name!r}; {hint}")
        module, make = _BUILT_IN[kind][name].split(":")
        path = module if module.startswith("tilewise.") else f"tilewise.tune.families.{module}"
        _loaded[kind, name] = getattr(importlib.import_module(path), make)()
    return _loaded[kind, name]
