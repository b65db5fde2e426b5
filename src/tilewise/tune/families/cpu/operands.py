"""Memory alignment of operands, so that repeated runs measure the same thing.

A kernel that reads an operand unpacked is up to a fifth slower if its rows do not start on cache lines, and NumPy
aligns arrays to 16 bytes only; small pages map to other cache sets in every process. The operands of a measurement are
therefore aligned to cache lines on large pages, identically in every process.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_LARGE_PAGE = 2 << 20  # bytes, x86-64 and AArch64
# Bytes: an odd number of cache lines beyond whole pages, so that no two operands start at the same cache set.
_STAGGER = 17 * 64


def aligned_copies(operands: Mapping[str, Array]) -> dict[str, Array]:
    """Copy the operands, with their shapes and memory order, to reproducible addresses relative to a large page."""
    starts, end = {}, 0
    for number, (name, array) in enumerate(operands.items()):
        starts[name] = end + (number + 1) * _STAGGER
        end = -(-(starts[name] + array.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    arena = _arena(end)
    return {name: _copy(array, arena, starts[name]) for name, array in operands.items()}


def _arena(size: int) -> Array:
    """Allocate bytes that start at a large page, and use large pages if the system provides them."""
    block = mmap.mmap(-1, -(-max(size, 1) // _LARGE_PAGE) * _LARGE_PAGE + _LARGE_PAGE)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        block.madvise(mmap.MADV_HUGEPAGE)
    block_bytes = np.frombuffer(block, np.uint8)
    return block_bytes[-block_bytes.ctypes.data % _LARGE_PAGE :][:size]


def _copy(array: Array, arena: Array, start: int) -> Array:
    """Copy an array into the arena; a transposed matrix stays transposed."""
    is_transposed = array.ndim > 1 and not array.flags.c_contiguous
    source = array.swapaxes(-1, -2) if is_transposed else array
    target = arena[start : start + array.nbytes].view(array.dtype).reshape(source.shape)
    target[...] = source
    return target.swapaxes(-1, -2) if is_transposed else target
