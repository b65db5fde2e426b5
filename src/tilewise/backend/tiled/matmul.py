"""Tiles of the matrix product: how its loops are cut, and which cuts are feasible on this machine.

A `TileConfig` is a real parameter of `matmul_native`: it fixes the register tile, the cache blocks, what is packed and
how threads share the result. A cost model ranks the feasible ones of a shape, and a tuner measures them.
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

from tilewise.backend.tiled.op import Key, Rows, Shape, TiledOp, grids
from tilewise.errors import ConfigurationError

LAYOUTS = ("nn", "nt", "tn", "tt")
SIZES = ("m", "n", "k")
_K_BLOCKS = (64, 128, 256, 512, 1024)
_ROW_BLOCKS = (28, 84, 168, 336, 672)
_COLUMN_BLOCKS = (64, 256, 1024, 4096)


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How one matrix product is cut.

    mr x nr    the register tile: rows, and columns (whole vectors of the instruction set)
    mc, nc, kc the cache blocks: A's block is mc x kc (L2), B's kc x nc (L3), B's strip kc x nr (L1 and L2)
    pack_a, pack_b    whether blocks are rewritten in the order the kernel reads them
    threads_m x threads_n    the grid that the result is split into; each cell is one task
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
        """Plain numbers, for files and features."""
        return {name: int(getattr(self, name)) for name in self.__slots__}


class Matmul(TiledOp[TileConfig]):
    """c = a @ b: the shape is (m, n, k), the layout says which operand is a transposed view."""

    name = "matmul"
    tile_type = TileConfig
    columns: ClassVar[Mapping[str, str]] = {
        "register_m": "mr", "register_n": "nr", "block_m": "mc", "block_n": "nc", "block_k": "kc",
        "pack_a": "pack_a", "pack_b": "pack_b", "threads_m": "threads_m", "threads_n": "threads_n",
    }  # fmt: skip

    def check_shape(self, shape: Shape, layout: str | None) -> None:
        check_product(self.name, shape)
        if layout is not None and layout not in LAYOUTS:
            raise ConfigurationError(f"layout must be one of {', '.join(LAYOUTS)}, not {layout!r}")

    def default(self, module: ModuleType, shape: Shape, layout: str | None, threads: int) -> TileConfig:
        return product_plan(module, shape, layout or "nn", threads)[1]

    def candidates(self, module: ModuleType, shape: Shape, layout: str | None, threads: int) -> Iterator[TileConfig]:
        default = self.default(module, shape, layout, threads)
        yield from (TileConfig(*values) for values in around(module, default, shape, threads))
        yield from _candidates(module, shape, threads)

    def in_passing(self, module: ModuleType, shape: Shape, layout: str | None, threads: int) -> Rows:
        """The default alone where it runs no tiles; else its neighbours, and some fifty to two hundred more."""
        path, default = product_plan(module, shape, layout or "nn", threads)
        if path != "tiled":
            return np.array([tuple(default.as_dict().values())], np.int64)
        near = around(module, default, shape, threads)
        grid = [cut for mr, nr, *blocks in _thinned(module, *shape) for cut in product((mr,), (nr,), *blocks)]
        found = np.empty((len(near) + 2 * len(grid), 9), np.int64)
        found[: len(near)] = _numbers(near)
        thin = found[len(near) :].reshape(len(grid), 2, 9)  # B not packed, and packed
        thin[:, :, :5] = _numbers(grid)[:, None]
        thin[:, :, 5:] = [(default.pack_a, packed, default.threads_m, default.threads_n) for packed in (False, True)]
        return found

    def problem(self, module: ModuleType, tile: TileConfig, shape: Shape, layout: str | None) -> str | None:
        found: str | None = module.gemm_tile_problem(tile, *shape, layout is not None and layout[1] == "t")
        return found

    def keep(self, table: Any, shape: Shape, layout: str, threads: int, tile: TileConfig | None) -> None:
        table.keep_matmul(shape, layout, threads, tile)

    def spec(self, shape: Shape, layout: str) -> dict[str, int | str] | None:
        return {**dict(zip(SIZES, shape, strict=True)), "layout": layout}

    def key(self, spec: Mapping[str, Any]) -> Key | None:
        if spec.get("dtype") != "fp32":
            return None
        return tuple(int(spec[name]) for name in SIZES), "float32", str(spec["layout"])

    def tile(self, values: Mapping[str, Any]) -> TileConfig:
        found = super().tile(values)
        return replace(found, pack_a=bool(found.pack_a), pack_b=bool(found.pack_b))


def check_product(name: str, shape: Shape) -> None:
    """Raise a ConfigurationError where `shape` is no (m, n, k)."""
    if len(shape) != 3 or min(shape) < 1:
        article = "an" if name[0] in "aeiou" else "a"
        raise ConfigurationError(f"the shape of {article} {name} is (m, n, k), all positive, not {shape}")


def operand_views(shape: Shape, layout: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Operands that only their shapes and strides are read of; their memory is never touched."""
    m, n, k = shape
    a = np.empty((k, m), np.float32).T if layout[0] == "t" else np.empty((m, k), np.float32)
    b = np.empty((n, k), np.float32).T if layout[1] == "t" else np.empty((k, n), np.float32)
    return a, b


def product_plan(module: ModuleType, shape: Shape, layout: str, threads: int) -> tuple[str, TileConfig]:
    """The way a product takes without a tile, and the default's tile."""
    path, tile = module.matmul_plan(*operand_views(shape, layout), threads)
    return path, TileConfig(*tile)


def register_tiles(module: ModuleType) -> tuple[tuple[int, int, int], ...]:
    """For each width the tallest tile that fits and a few shorter ones; with the tallest one's rows."""
    return _by_height(tuple(module.gemm_register_tiles()))


@functools.lru_cache(maxsize=8)
def _by_height(tiles: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int, int], ...]:
    tallest: dict[int, int] = {}
    for mr, nr in tiles:
        tallest[nr] = max(mr, tallest.get(nr, 0))
    heights = {nr: sorted({most, max(1, most * 2 // 3), max(1, most // 3)}) for nr, most in tallest.items()}
    return tuple((mr, nr, tallest[nr]) for nr, rows in heights.items() for mr in rows)


def _clipped(sizes: tuple[int, ...], extent: int, grain: int) -> list[int]:
    """Blocks in whole grains, none larger than the extent needs, without repeats."""
    whole = -(-extent // grain) * grain
    return sorted({min(whole, max(1, size // grain) * grain) for size in sizes} | {min(whole, sizes[-1] * 4)})


def around(module: ModuleType, tile: TileConfig, shape: Shape, threads: int) -> list[tuple[Any, ...]]:
    """The tile and its neighbours: other blocks, or another packing, register tile or grid with the same blocks. Each
    is what `TileConfig` takes, in that order: choosing in passing has no time for objects."""
    m, n, k = shape

    def scaled(size: int, extent: int, grain: int, factors: tuple[float, ...]) -> list[int]:
        whole = -(-extent // grain) * grain
        return sorted({min(whole, max(1, round(min(size, whole) * f / grain)) * grain) for f in factors})

    rows, columns = scaled(tile.mc, m, tile.mr, (0.5, 1, 2)), scaled(tile.nc, n, tile.nr, (0.25, 0.5, 1, 2))
    depths = scaled(tile.kc, k, 1, (0.5, 0.67, 1, 1.5, 2))
    register, blocks = (tile.mr, tile.nr), (tile.mc, tile.nc, tile.kc)
    packing, grid = (tile.pack_a, tile.pack_b), (tile.threads_m, tile.threads_n)
    found = [(*register, *blocks, *packing, *grid)]
    found += [(*register, *other, *packing, *grid) for other in product(rows, columns, depths)]
    found += [(*register, *blocks, *other, *grid) for other in product((False, True), (False, True))]
    for mr, nr, _ in register_tiles(module):
        mc, nc = -(-min(tile.mc, m) // mr) * mr, -(-min(tile.nc, n) // nr) * nr
        found.append((mr, nr, mc, nc, tile.kc, *packing, *grid))
    found += [(*register, *blocks, *packing, *other) for other in grids(threads)]
    return list(dict.fromkeys(found))


def _numbers(rows: Sequence[tuple[Any, ...]]) -> Rows:
    return np.fromiter(chain.from_iterable(rows), np.int64).reshape(len(rows), -1)


def _candidates(module: ModuleType, shape: Shape, threads: int) -> Iterator[TileConfig]:
    m, n, k = shape
    for mr, nr, _ in register_tiles(module):
        blocks = product(_clipped(_ROW_BLOCKS, m, mr), _clipped(_COLUMN_BLOCKS, n, nr), _clipped(_K_BLOCKS, k, 1))
        for (mc, nc, kc), pack_a, pack_b, grid in product(blocks, (True, False), (True, False), grids(threads)):
            yield TileConfig(mr, nr, mc, nc, kc, pack_a, pack_b, *grid)


def _thinned(module: ModuleType, m: int, n: int, k: int) -> Iterator[tuple[int, int, list[int], list[int], list[int]]]:
    """Few register tiles, each with few row, column and depth blocks."""
    depths = _clipped((256, 512), k, 1)
    for mr, nr, tallest in register_tiles(module):
        if mr * 3 >= tallest * 2 - 2:
            yield mr, nr, _clipped((28, 168), m, mr), _clipped((256, 1024), n, nr), depths
