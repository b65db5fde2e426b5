"""Tiles of the native integer product: unsigned bytes times signed bytes, summed in 32 bits.

An `Int8Tile` is a real parameter of the product (`linear(..., tile=...)` of an integer layer): every field moves a loop
bound, and all of them give the same integers. Candidates are proposed around what registers and caches suggest.
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

_PANEL = 16  # columns that the packed weights keep together
_GROUP = 4  # values of K that one dot instruction takes
_ROW_BLOCKS = (24, 48, 96, 128, 256, 512)
_COLUMN_BLOCKS = (64, 192, 512, 2048)
_K_BLOCKS = (128, 512, 2048)


@dataclass(frozen=True, slots=True)
class Int8Tile:
    """How one integer product is cut.

    mr x nr    the register tile: rows, and columns in whole panels of 16; beside the last whole tile a narrower one
               takes its place, as much taller as the registers allow
    mc, nc, kc the cache blocks: mc rows by nc columns by kc values of K; with kc below K, sums wait in memory
    threads_m x threads_n    the grid that the result is split into; each cell is one task
    """

    mr: int
    nr: int
    mc: int
    nc: int
    kc: int
    threads_m: int = 1
    threads_n: int = 1

    def as_dict(self) -> dict[str, int]:
        """Plain numbers, for files and features."""
        return {name: getattr(self, name) for name in self.__slots__}


class Int8Matmul(TiledOp[Int8Tile]):
    """y = x @ w with the weights packed beforehand: the shape is (m, n, k). Choosers are not asked for it; its kernels
    use what was kept for them."""

    name = "int8_matmul"
    tile_type = Int8Tile
    columns: ClassVar[Mapping[str, str]] = {
        "register_m": "mr", "register_n": "nr", "block_m": "mc", "block_n": "nc", "block_k": "kc",
        "threads_m": "threads_m", "threads_n": "threads_n",
    }  # fmt: skip

    def check_shape(self, shape: Shape, layout: str | None) -> None:
        check_product(self.name, shape)
        if layout not in (None, "nt"):
            raise ConfigurationError(f"the layout of an integer product is 'nt', not {layout!r}")

    def default(self, module: ModuleType, shape: Shape, layout: str | None = None, threads: int = 1) -> Int8Tile:
        return Int8Tile(*module.int8_default_tile(*shape))

    def candidates(self, module: ModuleType, shape: Shape, layout: str | None, threads: int) -> Iterator[Int8Tile]:
        default = self.default(module, shape)
        if default.threads_m * default.threads_n in (1, threads):
            yield default
        yield from _candidates(module, shape, threads)

    def problem(self, module: ModuleType, tile: Int8Tile, shape: Shape, layout: str | None) -> str | None:
        try:
            found: str | None = module.int8_tile_problem(tile, shape[2])
        except ValueError as error:  # not a tile of this operation
            return str(error)
        return found

    def keep(self, table: Any, shape: Shape, layout: str, threads: int, tile: Int8Tile | None) -> None:
        if tile is not None:
            table.keep_int8(shape, threads, tile)

    def spec(self, shape: Shape, layout: str) -> dict[str, int | str] | None:
        return None  # a product alone does not say what becomes of its sums

    def key(self, spec: Mapping[str, Any]) -> Key | None:
        return tuple(int(spec[name]) for name in SIZES), "int8", "packed"


def _candidates(module: ModuleType, shape: Shape, threads: int) -> Iterator[Int8Tile]:
    m, n, k = shape
    depths = _clipped(_K_BLOCKS, k, _GROUP)
    for mr, nr in _register_tiles(module, m, n):
        blocks = product(_row_blocks(m, mr), _clipped(_COLUMN_BLOCKS, n, nr), depths)
        for (mc, nc, kc), grid in product(blocks, grids(threads)):
            yield Int8Tile(mr, nr, mc, nc, kc, *grid)


def _register_tiles(module: ModuleType, m: int, n: int) -> Iterator[tuple[int, int]]:
    """For each width the tallest tile and three shorter ones, none beyond the matrix."""
    widest = -(-n // _PANEL) * _PANEL
    for most, nr in module.int8_register_tiles():
        if nr <= widest:
            heights = (most, most * 3 // 4, most // 2, most // 4)
            yield from ((mr, nr) for mr in sorted({max(1, min(m, height)) for height in heights}))


def _row_blocks(m: int, mr: int) -> list[int]:
    """Whole register tiles, none larger than the matrix."""
    return sorted({min(m, max(1, size // mr) * mr) for size in _ROW_BLOCKS})


def _clipped(sizes: tuple[int, ...], extent: int, grain: int) -> list[int]:
    """Blocks in whole grains, none larger than the extent needs, and one that takes it all."""
    whole = -(-extent // grain) * grain
    return sorted({min(whole, max(1, size // grain) * grain) for size in sizes} | {whole})
