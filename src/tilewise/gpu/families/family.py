"""The interface of a family of Triton kernels, for the families of tilewise and for plug-ins.

A family defines its problems, its configurations, which of them fit a GPU, how to allocate operands, how to launch a
kernel and what the correct result is. Everything else (compiling in parallel, checking, timing, storing, exporting) is
shared. The first configuration of `configs` is the default; runtimes are normalised by the default's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tilewise.store.problem import Config, Problem, Value
from tilewise.tune.families import registry
from tilewise.tune.families.registry import Expected, Family

# Element types of a problem: their name in Triton, in PyTorch, and their size.
DTYPES = {"bf16": "bf16", "fp16": "fp16", "tf32": "fp32", "fp32": "fp32", "fp8": "fp8e4nv"}
TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "tf32": "float32", "fp32": "float32", "fp8": "float8_e4m3fn"}
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4, "fp8": 1}
GUARD_ELEMENTS = 1024  # behind every output, to detect stores past its end
MAX_ELEMENTS = 2**31 - 1  # kernels compute offsets inside one operand with 32-bit integers


@dataclass(frozen=True)
class Binary:
    """One compilation: a kernel function by name, the types of its arguments, and its compile-time constants."""

    kernel: str  # "module:function" under tilewise.gpu.kernels
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Value | bool], ...]
    num_warps: int
    num_stages: int

    @functools.cached_property
    def key(self) -> str:
        return repr((self.kernel, self.signature, self.constants, self.num_warps, self.num_stages))


CUBLAS_CALL = "library"  # stands in for a kernel's name where PyTorch calls cuBLAS and nothing is compiled


@dataclass(frozen=True)
class Launch:
    """The grid and the run-time arguments of a binary, in the order of the kernel's parameters; or a cuBLAS call."""

    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    call: Callable[[], Any] | None = None


@dataclass
class Operands:
    """The tensors of one problem.

    `out` is the start of the larger buffer `guarded`, whose end a correct kernel leaves unchanged.
    """

    inputs: dict[str, Any]
    out: Any
    guarded: Any
    scratch: dict[str, Any] = field(default_factory=dict)


class TritonFamily(Family, Protocol):
    """The methods that a family provides in addition to `Family`; see docs/adding-a-family.md."""

    def misfit(self, problem: Problem, config: Config, shared_bytes: int) -> str | None:
        """Return why a configuration cannot run with this much shared memory, or None; called before compiling."""

    def binary(self, problem: Problem, config: Config) -> Binary:
        """Describe the compilation of a configuration; equal `Binary`s are compiled once."""

    def operands(self, problem: Problem, torch: Any, device: str, generator: Any) -> Operands:
        """Allocate random inputs and a guarded output."""

    def bytes_moved(self, problem: Problem) -> int:
        """Return the bytes of all operands and the result, each counted once."""

    def expected(self, problem: Problem, torch: Any, operands: Operands) -> Expected:
        """Compute the result with PyTorch in float32, and the tolerance."""

    def launch(self, problem: Problem, config: Config, operands: Operands) -> Launch:
        """Return the grid and arguments of one run."""


add_family = functools.partial(registry.add_family, "triton")
family_names = functools.partial(registry.family_names, "triton")


def get_family(name: str) -> TritonFamily:
    """Return the Triton family of a name."""
    family: TritonFamily = registry.find_family("triton", name)
    return family


def alignment_unit(size: int, dtype: str) -> int:
    """Return the largest power of two that divides `size`, limited to the elements of a 16-byte load."""
    load_elements = 16 // ELEMENT_BYTES[dtype]
    return next(unit for unit in (8, 4, 2, 1) if unit <= load_elements and size % unit == 0)


def random_tensor(torch: Any, shape: Sequence[int], dtype: str, device: str, generator: Any) -> Any:
    """Draw a tensor of normally distributed numbers.

    tf32 operands are rounded to bf16 first: products then add no rounding, so the check against float32 can be strict.
    """
    values = torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)
    return (values.to(torch.bfloat16) if dtype == "tf32" else values).to(getattr(torch, TORCH_NAMES[dtype]))


def guarded_output(torch: Any, shape: Sequence[int], dtype: str, device: str) -> tuple[Any, Any]:
    """Allocate an output at the start of a larger buffer, which reveals out-of-bounds writes; return both."""
    count = 1
    for size in shape:
        count *= size
    buffer = torch.empty(count + GUARD_ELEMENTS, dtype=getattr(torch, TORCH_NAMES[dtype]), device=device)
    return buffer[:count].view(*shape), buffer
