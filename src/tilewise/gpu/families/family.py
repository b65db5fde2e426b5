"""The plug-in point of the Triton collector: what a family of kernels must say about itself.

A family knows its problems, its configurations, which of them fit, how to allocate operands, how to launch and what
the right answer is. Everything else (compiling in parallel, checking, timing, storing, exporting) is shared. The first
configuration of `configs` is the default, against which all others are normalised.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tilewise.store.problem import Config, Problem, Value
from tilewise.tune.families import registry
from tilewise.tune.families.registry import Expected, Family

DTYPES = {"bf16": "bf16", "fp16": "fp16", "tf32": "fp32", "fp32": "fp32"}
TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "tf32": "float32", "fp32": "float32"}
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4}
GUARD_ELEMENTS = 1024
MAX_ELEMENTS = 2**31 - 1  # offsets inside one operand are 32-bit integers in the kernels


@dataclass(frozen=True)
class Binary:
    """One compilation: a kernel function by name, the types of its arguments, and the constants baked in."""

    kernel: str  # "module:function" under tilewise.gpu.kernels
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Value | bool], ...]
    num_warps: int
    num_stages: int

    @functools.cached_property
    def key(self) -> str:
        return repr((self.kernel, self.signature, self.constants, self.num_warps, self.num_stages))


LIBRARY_CALL = "library"  # in the place of a kernel: PyTorch's own call, which nobody compiles


@dataclass(frozen=True)
class Launch:
    """How to start a binary: the grid and the run-time arguments, in the order of the kernel's parameters; or, of a
    library, the call itself."""

    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    call: Callable[[], Any] | None = None


@dataclass
class Operands:
    """The tensors of one problem. `out` is a view of `guarded`, whose tail no kernel may touch."""

    inputs: dict[str, Any]
    out: Any
    guarded: Any
    scratch: dict[str, Any] = field(default_factory=dict)


class TritonFamily(Family, Protocol):
    """What a plug-in provides; see docs/adding-a-family.md."""

    def misfit(self, problem: Problem, config: Config, shared_bytes: int) -> str | None:
        """Why a configuration cannot run on a GPU with so much shared memory, or None; checked before compiling."""

    def binary(self, problem: Problem, config: Config) -> Binary:
        """What must be compiled for it; problems that share binaries share compilations."""

    def operands(self, problem: Problem, torch: Any, device: str, generator: Any) -> Operands:
        """Fresh random inputs and a guarded output."""

    def bytes_moved(self, problem: Problem) -> int:
        """Bytes of all operands, each counted once."""

    def expected(self, problem: Problem, torch: Any, operands: Operands) -> Expected:
        """The answer from PyTorch in float32, and the tolerance."""

    def launch(self, problem: Problem, config: Config, operands: Operands) -> Launch:
        """Grid and arguments of one run."""


add_family = functools.partial(registry.add_family, "triton")
family_names = functools.partial(registry.family_names, "triton")


def get_family(name: str) -> TritonFamily:
    family: TritonFamily = registry.find_family("triton", name)
    return family


def unit_of(size: int, dtype: str) -> int:
    """The most elements, up to the 16 bytes of a load, that divide `size`: what the compiler may know of alignment."""
    widest = 16 // ELEMENT_BYTES[dtype]
    return next(unit for unit in (8, 4, 2, 1) if unit <= widest and size % unit == 0)


def draw(torch: Any, shape: Sequence[int], dtype: str, device: str, generator: Any) -> Any:
    """Random normal numbers. tf32 ones are rounded to bf16 first, so that a product itself adds no rounding and the
    check against float32 stays sharp."""
    drawn = torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)
    return (drawn.to(torch.bfloat16) if dtype == "tf32" else drawn).to(getattr(torch, TORCH_NAMES[dtype]))


def guarded_output(torch: Any, shape: Sequence[int], dtype: str, device: str) -> tuple[Any, Any]:
    """An output and the larger buffer it is the head of."""
    count = 1
    for size in shape:
        count *= size
    buffer = torch.empty(count + GUARD_ELEMENTS, dtype=getattr(torch, TORCH_NAMES[dtype]), device=device)
    return buffer[:count].view(*shape), buffer
