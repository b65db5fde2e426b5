"""The plug-in interface of the CPU collector: families of native kernels.

It is simpler than the interface for Triton: nothing is compiled, and the kernel is a Python callable. The first
configuration of `configs` is the default; runtimes are relative to it.

The operands of a measurement are aligned to cache lines on large pages, identically in every process
(`aligned_copies`): a kernel that reads an operand unpacked is up to a fifth slower if its rows do not start on cache
lines, and NumPy aligns arrays to 16 bytes only; small pages map to other cache sets in every process.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise.backend.tiled import tile_space, tiled_op
from tilewise.errors import UnavailableError
from tilewise.store.problem import Config, Problem
from tilewise.tune.families import registry
from tilewise.tune.families.registry import Expected, Family

Array = npt.NDArray[Any]
THREADS = tuple(range(1, 65))  # numbers of threads that a problem may have
_LARGE_PAGE = 2 << 20  # bytes, x86-64 and AArch64
# Bytes: an odd number of cache lines beyond whole pages, so that no two operands start at the same cache set.
_STAGGER = 17 * 64


class CpuFamily(Family, Protocol):
    """Interface of a CPU family; see docs/adding-a-family.md."""

    def operands(self, problem: Problem, rng: np.random.Generator) -> Mapping[str, Array]:
        """Draw random operands, by name."""

    def expected(self, problem: Problem, operands: Mapping[str, Array]) -> Expected:
        """Compute the result with NumPy in higher precision; return it with its tolerance."""

    def runner(self, problem: Problem, config: Config, operands: Mapping[str, Array]) -> Callable[[], Array]:
        """Return a function that runs the kernel once with this configuration and returns its result."""


def require_native() -> Any:
    """Return the compiled extension; raise UnavailableError without it."""
    if native is None:
        raise UnavailableError("There are no tiles to measure: tilewise's compiled kernels are not installed here.")
    return native


def normal(rng: np.random.Generator, shape: Sequence[int]) -> Array:
    """Draw a float32 array of normal numbers."""
    return rng.standard_normal(shape, dtype=np.float32)


def is_right(result: Array, expected: Expected) -> bool:
    """Tell whether a result is within its tolerance everywhere; a NaN is not."""
    same_shape = result.shape == expected.value.shape
    return same_shape and bool((np.abs(result - expected.value) <= expected.bound).all())


add_family, family_names = partial(registry.add_family, "cpu"), partial(registry.family_names, "cpu")


def get_family(name: str) -> CpuFamily:
    """Return the CPU kernel family called `name`."""
    family: CpuFamily = registry.find_family("cpu", name)
    return family


def config_for(op: str, tile: Any) -> Config:
    """Convert a native tile of operation `op` ("matmul", "conv2d", ...) to a configuration."""
    return Config(tiled_op(op).values(tile))


def tile_for(op: str, config: Config) -> Any:
    """Convert a configuration to a native tile of operation `op` ("matmul", "conv2d", ...)."""
    return tiled_op(op).tile(config)


def all_tiles(op: str, shape: tuple[int, ...], threads: int) -> list[Config]:
    """List all feasible tiles of an operation as configurations, the default first."""
    default = tiled_op(op).default(require_native(), shape, None, threads)
    space = tile_space(op, shape, threads=threads)
    return [config_for(op, default), *(config_for(op, tile) for tile in space if tile != default)]


def at_most(size: Any, limit: int) -> Any:
    """Return min(size, limit) for one configuration's block size, or for a column of several."""
    return np.minimum(size, limit) if isinstance(size, np.ndarray) else min(size, limit)


def product_blocks(problem: Problem, config: Config) -> Mapping[str, Sequence[int]]:
    """Return the blocks of a matrix product's tile by operand, limited to the size of the matrices."""
    rows, columns, depth = (
        at_most(config.size(block), problem.size(name))
        for block, name in (("block_m", "m"), ("block_n", "n"), ("block_k", "k"))
    )
    lead = [1] if "batch" in problem else []
    return {"kernel": [*lead, depth, columns], "output": [*lead, rows, columns], "input": [*lead, rows, depth]}


product_config, product_tile = partial(config_for, "matmul"), partial(tile_for, "matmul")


def aligned_copies(operands: Mapping[str, Array]) -> dict[str, Array]:
    """Copy the operands to addresses with fixed offsets from a large page, so that timings are reproducible.

    Shapes and memory order are preserved.
    """
    starts, end = {}, 0
    for number, (name, array) in enumerate(operands.items()):
        starts[name] = end + (number + 1) * _STAGGER
        end = -(-(starts[name] + array.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    arena = _arena(end)
    return {name: _copy_into(array, arena, starts[name]) for name, array in operands.items()}


def _arena(size: int) -> Array:
    """Allocate `size` bytes aligned to a large page, backed by large pages if the system has them."""
    block = mmap.mmap(-1, -(-max(size, 1) // _LARGE_PAGE) * _LARGE_PAGE + _LARGE_PAGE)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        block.madvise(mmap.MADV_HUGEPAGE)
    block_bytes = np.frombuffer(block, np.uint8)
    return block_bytes[-block_bytes.ctypes.data % _LARGE_PAGE :][:size]


def _copy_into(array: Array, arena: Array, start: int) -> Array:
    """Copy an array into the arena at byte `start`; a transposed matrix stays transposed."""
    is_transposed = array.ndim > 1 and not array.flags.c_contiguous
    source = array.swapaxes(-1, -2) if is_transposed else array
    target = arena[start : start + array.nbytes].view(array.dtype).reshape(source.shape)
    target[...] = source
    return target.swapaxes(-1, -2) if is_transposed else target
