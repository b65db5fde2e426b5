"""Matrix multiplication: the native kernel, NumPy beside it, and how the router sees them.

`matmul_native` is the compiled function itself, not a wrapper: on small matrices the call decides, and a Python layer
would cost as much as the product. It takes float32 arrays of any strides and never copies a transposed view.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise.backend.registry import implements
from tilewise.backend.tiles import TileConfig
from tilewise.errors import UnavailableError

Array = npt.NDArray[Any]


def matmul_numpy(a: Array, b: Array) -> Array:
    """`a @ b` by NumPy and the BLAS it was built with."""
    return np.asarray(np.matmul(a, b))


def _matmul_unavailable(a: Array, b: Array, tile: TileConfig | None = None, **_options: Any) -> Array:
    raise UnavailableError("matmul_native needs tilewise's compiled kernels; install g++ and reinstall, or use NumPy")


matmul_native: Callable[..., Array] = _matmul_unavailable if native is None else native.matmul
"""matmul_native(a, b, tile=None, *, bias=None, activation=None, residual=None): float32, any strides, batched.

>>> import numpy as np
>>> a, b = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
>>> matmul_native(a, b, bias=np.zeros(4, np.float32), activation="relu").shape
(2, 4)
"""


_FLOAT32 = np.dtype(np.float32)
_LAYOUTS = (("nn", "nt"), ("tn", "tt"))
_TINY = 50_000  # multiplications: below, looking up a tile costs more than a better one could save
_SHORT, _THIN = 12, 4  # terms of a sum, rows or columns: up to here the loops without tiles are faster than any tile


def _transposed(x: Array) -> bool:
    strides, itemsize = x.strides, x.itemsize
    return len(strides) > 1 and strides[-1] != itemsize and strides[-2] == itemsize


def matmul_tile_key(a: Array, b: Array, **_options: Any) -> tuple[tuple[int, ...], str, str] | None:
    """The product as a tile chooser sees it: (m, n, k), dtype, layout; None where it is too small or thin to ask.

    Rows of a batch that shares B count as one m.
    """
    rows, n, k = sizes = _sizes(a, b)
    if rows * n * k < _TINY or k <= _SHORT or rows < _THIN or n <= _THIN:
        return None
    dtype = "float32" if a.dtype is _FLOAT32 else a.dtype.name
    return sizes, dtype, _LAYOUTS[_transposed(a)][_transposed(b)]


def _sizes(a: Array, b: Array) -> tuple[int, int, int]:
    shape, other = a.shape, b.shape
    k, n = shape[-1], 1 if len(other) == 1 else other[-1]
    rows = 1 if len(shape) == 1 else (a.size // max(k, 1) if len(other) <= 2 else shape[-2])
    return rows, n, k


def default_matmul_tile(a: Array, b: Array) -> TileConfig:
    """The tile `matmul_native(a, b)` uses when it is given none (docs/tiles.md says how it is chosen)."""
    if native is None:
        raise UnavailableError("tiles belong to tilewise's compiled kernels, which are not installed")
    return TileConfig(*native.matmul_plan(a, b)[1])


def _describe_native(a: Array, b: Array, **_options: Any) -> tuple[str, TileConfig | None]:
    assert native is not None
    path, tile = native.matmul_plan(a, b)
    m, n, k = _sizes(a, b)
    what = f"float32 {m}x{k} by {k}x{n} ({_LAYOUTS[_transposed(a)][_transposed(b)]}) on {native.isa()}"
    if path == "tiled":
        return f"{what} runs the tiled kernel", TileConfig(*tile)
    return f"{what} is bound by memory and runs unpacked {path}", None


if native is not None:
    implements("matmul", "native", native.matmul_suits, matmul_tile_key, _describe_native)(native.matmul)
