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
from tilewise.backend.tiled.matmul import TileConfig
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


def matmul_tile_key(a: Array, b: Array, **_options: Any) -> tuple[tuple[int, ...], str, str] | None:
    """The product as a tile chooser sees it: (m, n, k), dtype, layout; None where it is too small or thin to ask, a
    batch of several products, or has gaps between the elements of B both ways.

    Rows of a batch that shares B count as one m.
    """
    assert native is not None
    key = native.matmul_tile_key(a, b)
    return None if key is None else (key[0], "float32", key[1])


def _transposed(x: Array) -> bool:
    strides, itemsize = x.strides, x.itemsize
    return len(strides) > 1 and strides[-1] != itemsize and strides[-2] == itemsize


def _layout(a: Array, b: Array) -> str:
    return ("t" if _transposed(a) else "n") + ("t" if _transposed(b) else "n")


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
    what = f"float32 {m}x{k} by {k}x{n} ({_layout(a, b)}) on {native.isa()}"
    if path == "tiled":
        return f"{what} runs the tiled kernel", TileConfig(*tile)
    return f"{what} is bound by memory and runs unpacked {path}", None


if native is not None:
    implements("matmul", "native", native.matmul_suits, matmul_tile_key, _describe_native)(native.matmul)
