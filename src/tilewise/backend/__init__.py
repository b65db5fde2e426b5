"""Implementations of the framework's operations on arrays, and the dispatch between them.

The three most important names: `OptimizedBackend` (dispatches an operation to an implementation), `matmul_native` (the
compiled matrix product) and `tile_space` (the feasible tiles of an operation).
"""

from typing import TYPE_CHECKING

from tilewise._late import late_names
from tilewise.backend import rows  # noqa: F401 - registers their operations
from tilewise.backend.conv import default_conv2d_tile
from tilewise.backend.gemm import default_matmul_tile, matmul_native, matmul_numpy
from tilewise.backend.registry import Explanation, OptimizedBackend, current_backend, use_backend

if TYPE_CHECKING:
    from tilewise.backend.ladder import matmul_blocked, matmul_naive
    from tilewise.backend.tiled import check_tile, tile_space
    from tilewise.backend.tiled.conv2d import ConvTile, conv2d_shape
    from tilewise.backend.tiled.int8_matmul import Int8Tile
    from tilewise.backend.tiled.matmul import TileConfig

__all__ = [
    "ConvTile",
    "Explanation",
    "Int8Tile",
    "OptimizedBackend",
    "TileConfig",
    "check_tile",
    "conv2d_shape",
    "current_backend",
    "default_conv2d_tile",
    "default_matmul_tile",
    "matmul_blocked",
    "matmul_naive",
    "matmul_native",
    "matmul_numpy",
    "tile_space",
    "use_backend",
]

__getattr__ = late_names(
    __name__,
    {
        ".ladder": "matmul_blocked matmul_naive",
        ".tiled": "check_tile tile_space",
        ".tiled.conv2d": "ConvTile conv2d_shape",
        ".tiled.int8_matmul": "Int8Tile",
        ".tiled.matmul": "TileConfig",
    },
)
