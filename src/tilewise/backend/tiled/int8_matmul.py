"""Tiles of the native INT8 product: uint8 times int8, accumulated in int32.

An `Int8Tile` is a parameter of the product (`linear(..., tile=...)` of an INT8 layer): every field changes a loop
bound, and all tiles give the same integers. Candidates are close to the sizes that registers and caches suggest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from types import ModuleType
from typing import Any, ClassVar

from tilewise.backend.tiled.matmul import SIZES, check_product
from tilewise.backend.tiled.op import Key, Shape, TiledOp, grids
from tilewise.errors import ConfigurationError

_PANEL = 16  # columns per panel of the packed weights, fixed by the native kernel
_DOT_SIZE = 4  # values of K per dot-product instruction (VNNI, AVX2 emulation)
# Candidate cache blocks: geometric series from a few register tiles up to about the L2 cache.
_ROW_BLOCKS = (24, 48, 96, 128, 256, 512)
_COLUMN_BLOCKS = (64, 192, 512, 2048)
_K_BLOCKS = (128, 512, 2048)


@dataclass(frozen=True, slots=True)
class Int8Tile:
    """Block sizes of one INT8 product.

    mr x nr    register tile: rows by columns, in whole panels of 16. The remaining columns use a narrower tile, which
               is as much taller as the registers allow
    mc, nc, kc cache blocks: mc rows by nc columns by kc values of K. If kc is below K, partial sums are in memory
    threads_m x threads_n    grid of tasks that the result is split into
    """

    mr: int
    nr: int
    mc: int
    nc: int
    kc: int
    threads_m: int = 1
    threads_n: int = 1

    def as_dict(self) -> dict[str, int]:
        """Convert to plain numbers, for files and features."""
        return {name: getattr(self, name) for name in self.__slots__}


class TiledInt8Matmul(TiledOp[Int8Tile]):
    """Tiles of y = x @ w with packed weights. The shape is (m, n, k).

    Tile choosers are not called for it; the kernels use tuned tiles from the table, or the default.
    """

    name = "int8_matmul"
    tile_type = Int8Tile
    columns: ClassVar[Mapping[str, str]] = {
        "register_m": "mr", "register_n": "nr", "block_m": "mc", "block_n": "nc", "block_k": "kc",
        "threads_m": "threads_m", "threads_n": "threads_n",
    }  # fmt: skip

    def check_shape(self, shape: Shape, layout: str | None) -> None:
        """Raise `ConfigurationError` unless the shape is (m, n, k) and the layout is "nt" or None."""
        check_product(self.name, shape)
        if layout not in (None, "nt"):
            raise ConfigurationError(f"the layout of an INT8 product must be 'nt', not {layout!r}")

    def default(self, module: ModuleType, shape: Shape, layout: str | None = None, threads: int = 1) -> Int8Tile:
        return Int8Tile(*module.int8_default_tile(*shape))

    def candidates(self, module: ModuleType, shape: Shape, layout: str | None, threads: int) -> Iterator[Int8Tile]:
        """Yield the default tile, if it uses one thread or all, then every other tile worth measuring."""
        default = self.default(module, shape)
        if default.threads_m * default.threads_n in (1, threads):
            yield default
        yield from _candidates(module, shape, threads)

    def infeasible_reason(self, module: ModuleType, tile: Int8Tile, shape: Shape, layout: str | None) -> str | None:
        """Return why the kernel cannot run this tile on this shape; None if it can."""
        try:
            reason: str | None = module.int8_tile_problem(tile, shape[2])
        except ValueError as error:  # not a tile of this operation
            return str(error)
        return reason

    def add_to_table(self, table: Any, shape: Shape, layout: str, threads: int, tile: Int8Tile | None) -> None:
        if tile is not None:
            table.keep_int8(shape, threads, tile)

    def spec(self, shape: Shape, layout: str) -> dict[str, int | str] | None:
        return None  # the family also needs the output stage, which a shape does not determine

    def key(self, spec: Mapping[str, Any]) -> Key | None:
        return tuple(int(spec[name]) for name in SIZES), "int8", "packed"


def _candidates(module: ModuleType, shape: Shape, threads: int) -> Iterator[Int8Tile]:
    """Yield every combination of register tile, block sizes and thread grid for an INT8 product of (m, n, k)."""
    m, n, k = shape
    depths = _block_sizes(_K_BLOCKS, k, _DOT_SIZE)
    for mr, nr in _register_tiles(module, m, n):
        blocks = product(_row_blocks(m, mr), _block_sizes(_COLUMN_BLOCKS, n, nr), depths)
        for (mc, nc, kc), grid in product(blocks, grids(threads)):
            yield Int8Tile(mr, nr, mc, nc, kc, *grid)


def _register_tiles(module: ModuleType, m: int, n: int) -> Iterator[tuple[int, int]]:
    """Yield (mr, nr): for each width the tallest register tile and three lower ones, at most m rows."""
    max_width = -(-n // _PANEL) * _PANEL
    for max_height, nr in module.int8_register_tiles():
        if nr <= max_width:
            heights = (max_height, max_height * 3 // 4, max_height // 2, max_height // 4)
            yield from ((mr, nr) for mr in sorted({max(1, min(m, height)) for height in heights}))


def _row_blocks(m: int, mr: int) -> list[int]:
    """Return row block sizes: multiples of the register tile's rows, at most m."""
    return sorted({min(m, max(1, size // mr) * mr) for size in _ROW_BLOCKS})


def _block_sizes(sizes: tuple[int, ...], extent: int, unit: int) -> list[int]:
    """Round block sizes up to multiples of `unit`, limited to `extent`, of which one block may cover all."""
    whole = -(-extent // unit) * unit
    return sorted({min(whole, max(1, size // unit) * unit) for size in sizes} | {whole})
