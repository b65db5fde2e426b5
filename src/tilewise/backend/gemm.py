"""Matrix multiplication by the native kernel and by NumPy, and their registration.

`matmul_native` is the compiled function itself, not a wrapper: on small matrices a Python wrapper would cost as much
as the product. It accepts float32 arrays with any strides and never copies a transposed view.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise.backend.registry import implements
from tilewise.errors import ShapeError, UnavailableError

if TYPE_CHECKING:
    from tilewise.backend.tiled.matmul import TileConfig

Array = npt.NDArray[Any]


def matmul_numpy(a: Array, b: Array) -> Array:
    """Compute `a @ b` with NumPy and its BLAS."""
    try:
        return np.asarray(np.matmul(a, b))
    except (TypeError, ValueError) as error:
        raise ShapeError(f"these are not two matrices that can be multiplied: {error}") from None


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
    """Return the tile chooser's key of a product: ((m, n, k), dtype, layout).

    None if tiles do not apply: the product is small or thin, a batch of several products, or B is strided in both
    dimensions. The rows of a batch that shares B count as one m.
    """
    assert native is not None
    key = native.matmul_tile_key(a, b)
    return None if key is None else (key[0], "float32", key[1])


def _is_column_major(x: Array) -> bool:
    """Tell whether a matrix is column-major, so that kernels read it as a transposed row-major one."""
    strides, itemsize = x.strides, x.itemsize
    return len(strides) > 1 and strides[-1] != itemsize and strides[-2] == itemsize


def _sizes(a: Array, b: Array) -> tuple[int, int, int]:
    """Return (m, n, k) of a product; leading dimensions of A count as rows if B is one matrix."""
    k, n = a.shape[-1], 1 if b.ndim == 1 else b.shape[-1]
    m = 1 if a.ndim == 1 else (a.size // max(k, 1) if b.ndim <= 2 else a.shape[-2])
    return m, n, k


def default_matmul_tile(a: Array, b: Array) -> TileConfig:
    """Return the tile that `matmul_native(a, b)` uses by default (see docs/tiles.md)."""
    if native is None:
        raise UnavailableError("tiles need tilewise's compiled kernels; install g++ and reinstall")
    return _tile_config(native.matmul_plan(a, b)[1])


def _tile_config(sizes: tuple[Any, ...]) -> TileConfig:
    """Convert the tuple of numbers that the native library returns to a `TileConfig`."""
    from tilewise.backend.tiled.matmul import TileConfig

    return TileConfig(*sizes)


def _describe_native(a: Array, b: Array, **_options: Any) -> tuple[str, TileConfig | None]:
    """Describe in a sentence which native kernel runs a @ b, and return its tile (None if the kernel has none)."""
    assert native is not None
    path, tile = native.matmul_plan(a, b)
    m, n, k = _sizes(a, b)
    layout = "".join("t" if _is_column_major(x) else "n" for x in (a, b))
    product = f"float32 {m}x{k} by {k}x{n} ({layout}) on {native.isa()}"
    if path == "tiled":
        return f"{product} runs the tiled kernel", _tile_config(tile)
    return f"{product} is bound by memory and runs the unpacked {path} kernel", None


if native is not None:
    implements("matmul", "native", native.matmul_suits, matmul_tile_key, _describe_native)(native.matmul)
