"""Tiles of the matrix product: its block sizes, and which of them are feasible on this machine.

A `TileConfig` is a parameter of `matmul_native`: it sets the register tile, the cache blocks, what is packed and how
threads share the result (compare Goto and van de Geijn 2008). A cost model ranks the feasible tiles of a shape, and a
tuner measures them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tilewise.backend.tiled.op import Key, Shape, TiledOp, TileRows, grids
from tilewise.errors import ConfigurationError

LAYOUTS = ("nn", "nt", "tn", "tt")
SIZES = ("m", "n", "k")
# Candidate cache blocks: geometric series around the sizes that fit L1 (k), L2 (rows) and L3 (columns).
_K_BLOCKS = (64, 128, 256, 512, 1024)
_ROW_BLOCKS = (28, 84, 168, 336, 672)
_COLUMN_BLOCKS = (64, 256, 1024, 4096)


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Block sizes of one matrix product.

    mr x nr    register tile: rows by columns (whole vectors of the instruction set)
    mc, nc, kc cache blocks: A's block is mc x kc (L2), B's kc x nc (L3), B's strip kc x nr (L1 and L2)
    pack_a, pack_b    True if blocks are copied into the order the kernel reads them
    threads_m x threads_n    grid of tasks that the result is split into
    """

    mr: int
    nr: int
    mc: int
    nc: int
    kc: int
    pack_a: bool = True
    pack_b: bool = True
    threads_m: int = 1
    threads_n: int = 1

    def as_dict(self) -> dict[str, int]:
        """Convert to plain numbers, for files and features."""
        return {name: int(getattr(self, name)) for name in self.__slots__}


class TiledMatmul(TiledOp[TileConfig]):
    """Tiles of c = a @ b. The shape is (m, n, k); the layout says which operand is a transposed view."""

    name = "matmul"
    tile_type = TileConfig
    columns: ClassVar[Mapping[str, str]] = {
        "register_m": "mr", "register_n": "nr", "block_m": "mc", "block_n": "nc", "block_k": "kc",
        "pack_a": "pack_a", "pack_b": "pack_b", "threads_m": "threads_m", "threads_n": "threads_n",
    }  # fmt: skip

    def check_shape(self, shape: Shape, layout: str | None) -> None:
        """Raise `ConfigurationError` unless the shape is (m, n, k) and the layout is known or None."""
        check_product(self.name, shape)
        if layout is not None and layout not in LAYOUTS:
            raise ConfigurationError(f"layout must be one of {', '.join(LAYOUTS)}, not {layout!r}")

    def default(self, module: ModuleType, shape: Shape, layout: str | None, threads: int) -> TileConfig:
        return product_plan(module, shape, layout or "nn", threads)[1]

    def candidates(self, module: ModuleType, shape: Shape, layout: str | None, threads: int) -> Iterator[TileConfig]:
        """Yield the default tile, its neighbours, and then a grid of all sizes; tiles may repeat."""
        default = self.default(module, shape, layout, threads)
        yield from (TileConfig(*values) for values in neighbours(module, default, shape, threads))
        yield from _candidates(module, shape, threads)

    def quick_candidates(self, module: ModuleType, shape: Shape, layout: str | None, threads: int) -> TileRows:
        """Return the default's neighbours and a coarse grid, 50 to 200 tiles as rows.

        Only the default if it is untiled.
        """
        path, default = product_plan(module, shape, layout or "nn", threads)
        if path != "tiled":
            return np.array([tuple(default.as_dict().values())], np.int64)
        near = neighbours(module, default, shape, threads)
        grid = [sizes for mr, nr, *blocks in _coarse_grid(module, *shape) for sizes in product((mr,), (nr,), *blocks)]
        tiles = np.empty((len(near) + 2 * len(grid), 9), np.int64)
        tiles[: len(near)] = _as_rows(near)
        coarse = tiles[len(near) :].reshape(len(grid), 2, 9)  # each twice: B not packed, and packed
        coarse[:, :, :5] = _as_rows(grid)[:, None]
        coarse[:, :, 5:] = [(default.pack_a, packed, default.threads_m, default.threads_n) for packed in (False, True)]
        return tiles

    def infeasible_reason(self, module: ModuleType, tile: TileConfig, shape: Shape, layout: str | None) -> str | None:
        reason: str | None = module.gemm_tile_problem(tile, *shape, layout is not None and layout[1] == "t")
        return reason

    def add_to_table(self, table: Any, shape: Shape, layout: str, threads: int, tile: TileConfig | None) -> None:
        table.keep_matmul(shape, layout, threads, tile)

    def spec(self, shape: Shape, layout: str) -> dict[str, int | str] | None:
        return {**dict(zip(SIZES, shape, strict=True)), "layout": layout}

    def key(self, spec: Mapping[str, Any]) -> Key | None:
        """Convert a float32 problem to (shape, dtype, layout), the tile chooser's key; None for other dtypes."""
        if spec.get("dtype") != "fp32":
            return None
        return tuple(int(spec[name]) for name in SIZES), "float32", str(spec["layout"])

    def tile(self, values: Mapping[str, Any]) -> TileConfig:
        tile = super().tile(values)
        return replace(tile, pack_a=bool(tile.pack_a), pack_b=bool(tile.pack_b))


def check_product(name: str, shape: Shape) -> None:
    """Raise a ConfigurationError unless `shape` is (m, n, k)."""
    if len(shape) != 3 or min(shape) < 1:
        article = "an" if name[0] in "aeiou" else "a"
        raise ConfigurationError(f"the shape of {article} {name} must be (m, n, k), all positive, not {shape}")


def operand_views(shape: Shape, layout: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Create operands with the shape's sizes and the layout's strides, but uninitialised memory."""
    m, n, k = shape
    a = np.empty((k, m), np.float32).T if layout[0] == "t" else np.empty((m, k), np.float32)
    b = np.empty((n, k), np.float32).T if layout[1] == "t" else np.empty((k, n), np.float32)
    return a, b


def product_plan(module: ModuleType, shape: Shape, layout: str, threads: int) -> tuple[str, TileConfig]:
    """Return the name of the code path that a product takes by default, and its default tile."""
    path, tile = module.matmul_plan(*operand_views(shape, layout), threads)
    return path, TileConfig(*tile)


def register_tiles(module: ModuleType) -> tuple[tuple[int, int, int], ...]:
    """Return the register tiles to try on this machine: (mr, nr, largest mr for this nr)."""
    return _register_tiles(tuple(module.gemm_register_tiles()))


@functools.lru_cache(maxsize=8)
def _register_tiles(tiles: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int, int], ...]:
    """Return, for each register-tile width, the largest height and two lower ones: (mr, nr, largest mr)."""
    max_heights: dict[int, int] = {}
    for mr, nr in tiles:
        max_heights[nr] = max(mr, max_heights.get(nr, 0))
    heights = {nr: sorted({top, max(1, top * 2 // 3), max(1, top // 3)}) for nr, top in max_heights.items()}
    return tuple((mr, nr, max_heights[nr]) for nr, rows in heights.items() for mr in rows)


def _block_sizes(sizes: tuple[int, ...], extent: int, unit: int) -> list[int]:
    """Round block sizes up to multiples of `unit`, limited to `extent`, without repeats."""
    whole = -(-extent // unit) * unit
    return sorted({min(whole, max(1, size // unit) * unit) for size in sizes} | {min(whole, sizes[-1] * 4)})


def neighbours(module: ModuleType, tile: TileConfig, shape: Shape, threads: int) -> list[tuple[Any, ...]]:
    """List a tile and its neighbours: other block sizes, or another packing, register tile or thread grid.

    Each is a tuple of the arguments of `TileConfig`, because creating objects takes too long in `quick_candidates`.
    """
    m, n, k = shape

    def scaled(size: int, extent: int, unit: int, scales: tuple[float, ...]) -> list[int]:
        whole = -(-extent // unit) * unit
        return sorted({min(whole, max(1, round(min(size, whole) * s / unit)) * unit) for s in scales})

    rows, columns = scaled(tile.mc, m, tile.mr, (0.5, 1, 2)), scaled(tile.nc, n, tile.nr, (0.25, 0.5, 1, 2))
    depths = scaled(tile.kc, k, 1, (0.5, 0.67, 1, 1.5, 2))
    register, blocks = (tile.mr, tile.nr), (tile.mc, tile.nc, tile.kc)
    packing, grid = (tile.pack_a, tile.pack_b), (tile.threads_m, tile.threads_n)
    tiles = [(*register, *blocks, *packing, *grid)]
    tiles += [(*register, *other, *packing, *grid) for other in product(rows, columns, depths)]
    tiles += [(*register, *blocks, *other, *grid) for other in product((False, True), (False, True))]
    for mr, nr, _ in register_tiles(module):
        mc, nc = -(-min(tile.mc, m) // mr) * mr, -(-min(tile.nc, n) // nr) * nr
        tiles.append((mr, nr, mc, nc, tile.kc, *packing, *grid))
    tiles += [(*register, *blocks, *packing, *other) for other in grids(threads)]
    return list(dict.fromkeys(tiles))


def _as_rows(rows: Sequence[tuple[Any, ...]]) -> TileRows:
    """Convert tile tuples to an integer array with one row per tile."""
    return np.fromiter(chain.from_iterable(rows), np.int64).reshape(len(rows), -1)


def _candidates(module: ModuleType, shape: Shape, threads: int) -> Iterator[TileConfig]:
    """Yield every combination of register tile, block sizes, packing and thread grid for a product."""
    m, n, k = shape
    for mr, nr, _ in register_tiles(module):
        blocks = product(
            _block_sizes(_ROW_BLOCKS, m, mr), _block_sizes(_COLUMN_BLOCKS, n, nr), _block_sizes(_K_BLOCKS, k, 1)
        )
        both = (True, False)
        for (mc, nc, kc), pack_a, pack_b, (rows, columns) in product(blocks, both, both, grids(threads)):
            yield TileConfig(mr, nr, mc, nc, kc, pack_a=pack_a, pack_b=pack_b, threads_m=rows, threads_n=columns)


def _coarse_grid(
    module: ModuleType, m: int, n: int, k: int
) -> Iterator[tuple[int, int, list[int], list[int], list[int]]]:
    """Yield tall register tiles with lists of two row, column and depth block sizes: (mr, nr, mcs, ncs, kcs)."""
    depths = _block_sizes((256, 512), k, 1)
    for mr, nr, max_height in register_tiles(module):
        if mr * 3 >= max_height * 2 - 2:
            yield mr, nr, _block_sizes((28, 168), m, mr), _block_sizes((256, 1024), n, nr), depths
