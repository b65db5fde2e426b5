"""Neighborhood of the default tile: most gains over a good default are found there, and it is small enough to rank in a
millisecond.

The default of a product derives the register tile, the blocks and the packing from the cache sizes. If it is not the
fastest, then usually a tile that differs in one or two of these is: other blocks, a matrix packed or not, another
register tile, another thread grid. `near_products` varies the default's own values, which a regular grid does not
contain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any

from tilewise.backend.tiled.matmul import TileConfig, product_plan, register_tiles
from tilewise.store.problem import Config, Problem
from tilewise.tune.families.cpu.family import product_config

# Block sizes to try; arbitrary, about a factor of two apart.
_ROWS = (28, 56, 112, 224, 448)
_COLUMNS = (128, 256, 512, 1024, 2048)
_DEPTHS = (64, 128, 192, 256, 384, 512, 768)
_WHOLE_EXTENT = 1 << 20  # a block larger than any matrix
Move = dict[str, Any]


def default_product(module: Any, problem: Problem) -> tuple[str, TileConfig]:
    """Algorithm of the default for a product, and its tile."""
    m, n, k = (problem.size(name) for name in "mnk")
    return product_plan(module, (m, n, k), problem.word("layout"), problem.size("threads"))


def near_products(module: Any, problem: Problem, changes: int = 2) -> list[Config]:
    """Feasible tiles of a product that differ from the default in at most `changes` aspects; the default is first."""
    m, n, k = (problem.size(name) for name in "mnk")
    path, default = default_product(module, problem)
    tiles: dict[tuple[int, ...], TileConfig] = {_effect(default, m, n, k): default}
    if path != "tiled":  # the default runs another algorithm, so its tile is one more candidate
        tiles = {(): default, **tiles}
    alternatives = _alternatives(module, default, m, n, k, problem.size("threads"))
    for count in range(1, changes + 1):
        for names in combinations(alternatives, count):
            for moves in product(*(alternatives[name] for name in names)):
                tile = _apply_moves(default, moves, m, n)
                key = _effect(tile, m, n, k)
                if key not in tiles and _feasible(module, tile, m, n, k, problem):
                    tiles[key] = tile
    return list(dict.fromkeys(map(product_config, tiles.values())))


def _feasible(module: Any, tile: TileConfig, m: int, n: int, k: int, problem: Problem) -> bool:
    return module.gemm_tile_problem(tile, m, n, k, problem.word("layout")[1] == "t") is None


def _alternatives(module: Any, default: TileConfig, m: int, n: int, k: int, threads: int) -> dict[str, list[Move]]:
    """Alternatives to the default, by aspect of the tile."""
    grids = [(t, threads // t) for t in range(1, threads + 1) if threads % t == 0]
    return {
        "packing": [
            {"pack_a": a, "pack_b": b}
            for a, b in product((False, True), repeat=2)
            if (a, b) != (default.pack_a, default.pack_b)
        ],
        "rows": [{"mc": size} for size in (*_below(_ROWS, m), _WHOLE_EXTENT)],
        "columns": [{"nc": size} for size in (*_below(_COLUMNS, n), _WHOLE_EXTENT)],
        "depth": [{"kc": size} for size in (*_below(_DEPTHS, k), k)],
        "registers": [{"mr": mr, "nr": nr} for mr, nr in _registers(module) if (mr, nr) != (default.mr, default.nr)],
        "grid": [{"threads_m": tm, "threads_n": tn} for tm, tn in grids] if threads > 1 else [],
    }


def _below(sizes: Sequence[int], extent: int) -> list[int]:
    return [size for size in sizes if size < extent]


def _registers(module: Any) -> Iterator[tuple[int, int]]:
    """Yield the tallest register tile of each width, and one of about two thirds of its height."""
    for mr, nr, tallest in register_tiles(module):
        if mr in (tallest, max(1, tallest * 2 // 3)):
            yield mr, nr


def _apply_moves(default: TileConfig, moves: Sequence[Move], m: int, n: int) -> TileConfig:
    """Change the default tile and round its blocks up to whole register tiles."""
    values = {name: getattr(default, name) for name in TileConfig.__slots__}
    for move in moves:
        values |= move
    mr, nr = values["mr"], values["nr"]
    values["mc"] = _round_up(min(values["mc"], m), mr)
    values["nc"] = _round_up(min(values["nc"], n), nr)
    return TileConfig(**values)


def _round_up(size: int, step: int) -> int:
    return max(1, -(-size // step)) * step


def _effect(tile: TileConfig, m: int, n: int, k: int) -> tuple[int, ...]:
    """Effective tile at these sizes: blocks larger than a matrix are equivalent."""
    blocks = min(tile.mc, _round_up(m, tile.mr)), min(tile.nc, _round_up(n, tile.nr)), min(tile.kc, k)
    return (tile.mr, tile.nr, *blocks, tile.pack_a, tile.pack_b, tile.threads_m, tile.threads_n)
