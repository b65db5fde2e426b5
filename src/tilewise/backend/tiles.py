"""Tiles: how the loops of a matrix product are cut, and which cuts are feasible on this machine.

A `TileConfig` is a real parameter of `matmul_native`: it fixes the register tile, the cache blocks, what is packed and
how threads share the result. `tile_space` lists the feasible ones for a shape, which is what a cost model ranks and a
tuner measures. The native code has the last word on feasibility (`gemm_tile_problem`); here candidates are proposed.
Convolution's tiles are in conv_tiles.py, the integer product's in int8_tiles.py; `tile_space` and `check_tile` answer
for all three.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from types import ModuleType
from typing import Literal, overload

import numpy as np

from tilewise._extension import native
from tilewise.backend import conv_tiles, int8_tiles
from tilewise.backend.conv_tiles import ConvTile
from tilewise.backend.int8_tiles import Int8Tile
from tilewise.errors import ConfigurationError, UnavailableError

LAYOUTS = ("nn", "nt", "tn", "tt")
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

    def __str__(self) -> str:
        packed = " and ".join(name for name, yes in (("A", self.pack_a), ("B", self.pack_b)) if yes) or "nothing"
        return (
            f"registers {self.mr}x{self.nr}, blocks m {self.mc} n {self.nc} k {self.kc}, "
            f"packs {packed}, threads {self.threads_m}x{self.threads_n}"
        )

    def as_dict(self) -> dict[str, int]:
        """Plain numbers, for files and features."""
        return {name: int(getattr(self, name)) for name in self.__slots__}


@overload
def tile_space(
    op: Literal["matmul"], shape: tuple[int, ...], *, layout: str | None = None, threads: int | None = None
) -> list[TileConfig]: ...
@overload
def tile_space(
    op: Literal["conv2d"], shape: tuple[int, ...], *, layout: str | None = None, threads: int | None = None
) -> list[ConvTile]: ...
@overload
def tile_space(
    op: Literal["int8_matmul"], shape: tuple[int, ...], *, layout: str | None = None, threads: int | None = None
) -> list[Int8Tile]: ...
@overload
def tile_space(
    op: str, shape: tuple[int, ...], *, layout: str | None = None, threads: int | None = None
) -> list[TileConfig] | list[ConvTile] | list[Int8Tile]: ...
def tile_space(
    op: str, shape: tuple[int, ...], *, layout: str | None = None, threads: int | None = None
) -> list[TileConfig] | list[ConvTile] | list[Int8Tile]:
    """Every feasible tile for `op` at `shape` on this machine and instruction set.

    The shape is (m, n, k) for matmul and int8_matmul; for conv2d it is (n, c, h, w, o, kh, kw, stride, stride, padding,
    padding, groups), which `conv2d_shape` gives. `threads` is how many tasks share the work; the default is the thread
    count in force.

    >>> len(tile_space("matmul", (512, 512, 512))) >= 200  # doctest: +SKIP
    True
    """
    module = _require_native()
    split = module.num_threads() if threads is None else threads
    if op == "conv2d":
        return conv_tiles.feasible(module, _conv_shape(shape, layout), split)
    if op == "int8_matmul":
        return int8_tiles.feasible(module, _int8_shape(shape, layout), split)
    m, n, k, transposed = _check(op, shape, layout)
    near = around(module, default_tile(module, (m, n, k), layout or "nn", split), (m, n, k), split)
    tiles = dict.fromkeys([*near, *_candidates(module, m, n, k, split)])
    return [tile for tile in tiles if module.gemm_tile_problem(tile, m, n, k, transposed) is None]


def check_tile(
    op: str, shape: tuple[int, ...], tile: TileConfig | ConvTile | Int8Tile, layout: str | None = None
) -> None:
    """Raise a ConfigurationError saying why `tile` cannot be used for `op` at `shape`, if it cannot."""
    module = _require_native()
    if op == "conv2d":
        problem = module.conv_tile_problem(tile, _conv_shape(shape, layout))
    elif op == "int8_matmul":
        problem = _int8_problem(module, tile, _int8_shape(shape, layout))
    else:
        m, n, k, transposed = _check(op, shape, layout)
        problem = module.gemm_tile_problem(tile, m, n, k, transposed)
    if problem is not None:
        raise ConfigurationError(f"this tile cannot be used: {problem}")


def _require_native() -> ModuleType:
    if native is None:
        raise UnavailableError("tiles belong to tilewise's compiled kernels, which are not installed")
    return native


def _check(op: str, shape: tuple[int, ...], layout: str | None) -> tuple[int, int, int, bool]:
    """(m, n, k, whether B is transposed) of a matrix product."""
    if op != "matmul":
        raise ConfigurationError(f"there is no tile space for {op!r}; matmul, conv2d and int8_matmul have one")
    if len(shape) != 3 or min(shape) < 1:
        raise ConfigurationError(f"the shape of a matmul is (m, n, k), all positive, not {shape}")
    if layout is not None and layout not in LAYOUTS:
        raise ConfigurationError(f"layout must be one of {', '.join(LAYOUTS)}, not {layout!r}")
    return shape[0], shape[1], shape[2], layout is not None and layout[1] == "t"


def _conv_shape(shape: tuple[int, ...], layout: str | None) -> tuple[int, ...]:
    if layout not in (None, "nchw"):
        raise ConfigurationError(f"the layout of a convolution is 'nchw', not {layout!r}")
    return tuple(shape)


def _int8_shape(shape: tuple[int, ...], layout: str | None) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape) < 1:
        raise ConfigurationError(f"the shape of an int8_matmul is (m, n, k), all positive, not {shape}")
    if layout not in (None, "nt"):
        raise ConfigurationError(f"the layout of an integer product is 'nt', not {layout!r}")
    return shape[0], shape[1], shape[2]


def _int8_problem(module: ModuleType, tile: object, shape: tuple[int, int, int]) -> str | None:
    try:
        problem: str | None = module.int8_tile_problem(tile, shape[2])
    except ValueError as error:  # not a tile of this operation
        return str(error)
    return problem


def _register_tiles(module: ModuleType) -> Iterator[tuple[int, int]]:
    """For each width the tallest tile that fits and a few shorter ones."""
    tallest: dict[int, int] = {}
    for mr, nr in module.gemm_register_tiles():
        tallest[nr] = max(mr, tallest.get(nr, 0))
    for nr, most in tallest.items():
        for mr in sorted({most, max(1, most * 2 // 3), max(1, most // 3)}):
            yield mr, nr


def _clipped(sizes: tuple[int, ...], extent: int, grain: int) -> list[int]:
    """Blocks in whole grains, none larger than the extent needs, without repeats."""
    whole = -(-extent // grain) * grain
    return sorted({min(whole, max(1, size // grain) * grain) for size in sizes} | {min(whole, sizes[-1] * 4)})


def default_tile(module: ModuleType, shape: tuple[int, int, int], layout: str, threads: int) -> TileConfig:
    """What a product uses when it is given no tile. Operands are made, but their memory is never touched."""
    m, n, k = shape
    a = np.empty((k, m), np.float32).T if layout[0] == "t" else np.empty((m, k), np.float32)
    b = np.empty((n, k), np.float32).T if layout[1] == "t" else np.empty((k, n), np.float32)
    return TileConfig(*module.matmul_plan(a, b, threads)[1])


def around(module: ModuleType, tile: TileConfig, shape: tuple[int, int, int], threads: int) -> list[TileConfig]:
    """The tile and its neighbours: other blocks, or another packing, register tile or grid with the same blocks."""
    m, n, k = shape

    def scaled(size: int, extent: int, grain: int, factors: tuple[float, ...]) -> list[int]:
        whole = -(-extent // grain) * grain
        return sorted({min(whole, max(1, round(min(size, whole) * f / grain)) * grain) for f in factors})

    rows, columns = scaled(tile.mc, m, tile.mr, (0.5, 1, 2)), scaled(tile.nc, n, tile.nr, (0.25, 0.5, 1, 2))
    depths = scaled(tile.kc, k, 1, (0.5, 0.67, 1, 1.5, 2))
    found = [tile, *(replace(tile, mc=mc, nc=nc, kc=kc) for mc, nc, kc in product(rows, columns, depths))]
    found += [replace(tile, pack_a=a, pack_b=b) for a, b in product((False, True), (False, True))]
    for mr, nr in _register_tiles(module):
        mc, nc = -(-min(tile.mc, m) // mr) * mr, -(-min(tile.nc, n) // nr) * nr
        found.append(replace(tile, mr=mr, nr=nr, mc=mc, nc=nc))
    found += [replace(tile, threads_m=down, threads_n=across) for down, across in _grids(threads)]
    return list(dict.fromkeys(found))


def _grids(threads: int) -> list[tuple[int, int]]:
    """Grids of as many tasks as there are threads."""
    return [(t, threads // t) for t in range(1, threads + 1) if threads % t == 0]


def _candidates(module: ModuleType, m: int, n: int, k: int, threads: int) -> Iterator[TileConfig]:
    grids = _grids(threads)
    for mr, nr in _register_tiles(module):
        blocks = product(_clipped(_ROW_BLOCKS, m, mr), _clipped(_COLUMN_BLOCKS, n, nr), _clipped(_K_BLOCKS, k, 1))
        for (mc, nc, kc), pack_a, pack_b, grid in product(blocks, (True, False), (True, False), grids):
            yield TileConfig(mr, nr, mc, nc, kc, pack_a, pack_b, *grid)


def tile_blocks(
    module: ModuleType, m: int, n: int, k: int
) -> Iterator[tuple[int, int, list[int], list[int], list[int]]]:
    """A thinned space for choosing in passing: register tiles, each with its row, column and depth blocks."""
    for mr, nr in _register_tiles(module):
        if mr * 3 < _tallest(module, nr) * 2 - 2:
            continue
        yield mr, nr, _clipped((28, 168), m, mr), _clipped((256, 1024), n, nr), _clipped((256, 512), k, 1)


def _tallest(module: ModuleType, nr: int) -> int:
    return int(max(mr for mr, width in module.gemm_register_tiles() if width == nr))
