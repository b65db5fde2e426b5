"""The ladder: one matrix product from three Python loops to all cores, one idea per rung.

Each rung is a function of two float32 matrices with the same result. `RUNGS` lists them in order with the idea that
each adds; `tilewise ladder` times them. Rungs 2 to 5 are scalar C++ compiled without vectorisation, so that their gains
come from the cache and the registers only; the last two are the framework's kernels, on one thread and on all. The
naive and the blocked rung are registered as backends of the lowest preference: `use_backend("naive")` runs a model on
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise._threads import get_num_threads, set_num_threads
from tilewise.backend.gemm import matmul_native, matmul_numpy
from tilewise.backend.numpy_ops import Activation, apply_epilogue
from tilewise.backend.registry import implements
from tilewise.errors import ConfigurationError, DtypeError, ShapeError, UnavailableError, as_array, type_name

Array = npt.NDArray[Any]
Block = int | Sequence[int]


def matmul_naive(a: Array, b: Array) -> Array:
    """Multiply by definition: three loops in Python."""
    a, b = _check_operands(a, b)
    (m, k), n = a.shape, b.shape[1]
    rows, columns = a.tolist(), b.T.tolist()
    out = np.empty((m, n), np.float32)
    for i in range(m):
        for j in range(n):
            row, column, total = rows[i], columns[j], 0.0
            for p in range(k):
                total += row[p] * column[p]
            out[i, j] = total
    return out


def matmul_compiled(a: Array, b: Array) -> Array:
    """Multiply with the same three loops, compiled."""
    return _native_rung("ladder_naive", a, b)


def matmul_reordered(a: Array, b: Array) -> Array:
    """Multiply with the loops over columns and depth exchanged, so that memory is read sequentially."""
    return _native_rung("ladder_reordered", a, b)


def matmul_blocked(a: Array, b: Array, block_size: Block = 64) -> Array:
    """Multiply in blocks that fit into the cache; `block_size` is one size, or (rows, columns, depth).

    Without the extension NumPy multiplies the blocks.
    """
    bm, bn, bk = _checked_block(block_size)
    a, b = _check_operands(a, b)
    if native is None:
        return _blocked_numpy(a, b, bm, bn, bk)
    out: Array = native.ladder_blocked(a, b, bm, bn, bk)
    return out


def matmul_packed(a: Array, b: Array) -> Array:
    """Multiply blocks packed in the order they are read, with a 4×3 tile of the result in registers."""
    return _native_rung("ladder_packed", a, b)


def matmul_vectorised(a: Array, b: Array) -> Array:
    """Multiply with the framework's kernel on one thread: vector instructions, larger register tiles, prefetching."""
    threads = get_num_threads()
    set_num_threads(1)
    try:
        return matmul_native(a, b)
    finally:
        set_num_threads(threads)


@dataclass(frozen=True)
class Rung:
    """A step of the ladder: its name, the idea it adds, and the function."""

    name: str
    idea: str
    run: Callable[[Array, Array], Array]


RUNGS = (
    Rung("python", "three loops in Python", matmul_naive),
    Rung("compiled", "the same loops, compiled", matmul_compiled),
    Rung("reordered", "walk memory in order", matmul_reordered),
    Rung("blocked", "reuse blocks while they are in the cache", matmul_blocked),
    Rung("packed", "copy blocks into reading order, sums in registers", matmul_packed),
    Rung("vectorised", "wide vector instructions", matmul_vectorised),
    Rung("native", "all threads", matmul_native),
)
PEER = Rung("numpy", "NumPy's library, for comparison", matmul_numpy)


def _float32_only(a: Array, b: Array, **_options: Any) -> str | None:
    return None if a.dtype == np.float32 and b.dtype == np.float32 else "the ladder is float32"


def _register(name: str, rung: Callable[[Array, Array], Array]) -> None:
    """Register a rung, a product of two float32 matrices, as an implementation of `matmul`."""

    @implements("matmul", name, _float32_only)
    def matmul(
        a: Array, b: Array, *, bias: Array | None = None, activation: Activation = None, residual: Array | None = None
    ) -> Array:
        return apply_epilogue(_batched(rung, a, b), bias, residual, activation)


_register("blocked", matmul_blocked)
_register("naive", matmul_naive)


def _batched(rung: Callable[[Array, Array], Array], a: Array, b: Array) -> Array:
    """Apply `rung` to every matrix of a batch, by NumPy's rules for vectors and broadcasting."""
    left, right = a[None, :] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b
    try:
        batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    except ValueError:
        raise ShapeError(f"matrices of shapes {a.shape} and {b.shape} cannot be multiplied") from None
    # Every pair of matrices of the broadcast batch is multiplied separately.
    left, right = (np.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (left, right))
    products = [rung(left[i], right[i]) for i in np.ndindex(batch)]
    out = np.array(products, np.float32).reshape(*batch, left.shape[-2], right.shape[-1])
    out = out[..., 0] if b.ndim == 1 else out
    return np.asarray(out if a.ndim > 1 else out[..., 0] if b.ndim == 1 else out[..., 0, :])


def _native_rung(name: str, a: Array, b: Array) -> Array:
    """Multiply by the native function called `name`; raise `UnavailableError` without the extension."""
    a, b = _check_operands(a, b)
    if native is None:
        raise UnavailableError("this rung of the ladder needs the compiled kernels; install g++ and reinstall")
    out: Array = getattr(native, name)(a, b)
    return out


def _check_operands(a: Array, b: Array) -> tuple[Array, Array]:
    """Convert both matrices to contiguous float32; raise an error if they cannot be multiplied."""
    operands = (a, b)
    a, b = as_array(a), as_array(b)
    if a.dtype.kind not in "fiu" or b.dtype.kind not in "fiu":
        kinds = [type_name(x) if y.dtype == object else str(y.dtype) for x, y in zip(operands, (a, b), strict=True)]
        raise DtypeError(f"a matrix product needs real numbers, not {' and '.join(kinds)}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ShapeError(f"matrices of shapes {a.shape} and {b.shape} cannot be multiplied")
    return np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b, np.float32)


def _checked_block(block: Block) -> tuple[int, int, int]:
    """Expand a block size to (rows, columns, depth) and check that each is at least 1."""
    sizes = tuple(block) if isinstance(block, Sequence) else (block, block, block)
    if len(sizes) != 3 or not all(isinstance(s, int | np.integer) and s >= 1 for s in sizes):
        raise ConfigurationError(f"block must be a positive size, or three (rows, columns, depth), not {block!r}")
    return int(sizes[0]), int(sizes[1]), int(sizes[2])


def _blocked_numpy(a: Array, b: Array, bm: int, bn: int, bk: int) -> Array:
    """Multiply in blocks of (bm, bk) by (bk, bn) with NumPy."""
    out = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for i in range(0, a.shape[0], bm):
        for p in range(0, a.shape[1], bk):
            for j in range(0, b.shape[1], bn):
                out[i : i + bm, j : j + bn] += a[i : i + bm, p : p + bk] @ b[p : p + bk, j : j + bn]
    return out
