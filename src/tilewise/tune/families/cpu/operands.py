"""Where operands lie. A kernel that reads an operand unpacked is up to a fifth slower where its rows do not start on
cache lines, and NumPy places arrays on any multiple of 16 bytes; small pages land on other cache sets every time. So
the operands of a measurement are put on cache lines of large pages, the same in every process: two runs then measure
the same thing.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_LARGE_PAGE = 2 << 20
# Beyond whole pages: an odd number of cache lines, so that no two start on the same cache set, nor on the result's.
_STAGGER = 17 * 64


def placed(operands: Mapping[str, Array]) -> dict[str, Array]:
    """Copies of the operands, of the same values, shapes and order in memory, at places that are always the same."""
    starts, end = {}, 0
    for number, (name, array) in enumerate(operands.items()):
        starts[name] = end + (number + 1) * _STAGGER
        end = -(-(starts[name] + array.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    arena = _arena(end)
    return {name: _copy(array, arena, starts[name]) for name, array in operands.items()}


def _arena(size: int) -> Array:
    """Bytes that start on a large page, and lie on large pages where the system has them."""
    block = mmap.mmap(-1, -(-max(size, 1) // _LARGE_PAGE) * _LARGE_PAGE + _LARGE_PAGE)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        block.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(block, np.uint8)
    return whole[-whole.ctypes.data % _LARGE_PAGE :][:size]


def _copy(array: Array, arena: Array, start: int) -> Array:
    turned = array.ndim > 1 and not array.flags.c_contiguous
    source = array.swapaxes(-1, -2) if turned else array
    target = arena[start : start + array.nbytes].view(array.dtype).reshape(source.shape)
    target[...] = source
    return target.swapaxes(-1, -2) if turned else target
