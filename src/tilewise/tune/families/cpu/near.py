"""Tiles near the default: where gains over a good default are found, and few enough to look at in a millisecond.

The default of a product fixes a register tile, blocks and packing from the caches. Where it is not the fastest, a tile
that differs from it in one or two of these is: other blocks, a matrix packed or not, another register tile, another
grid. `near_products` lists them around the default's own values, which a regular grid of tiles does not contain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any

from tilewise.backend.tiled.matmul import TileConfig, product_plan, register_tiles
from tilewise.store.problem import Config, Problem
from tilewise.tune.families.cpu.tiles import product_config

_ROWS = (28, 56, 112, 224, 448)
_COLUMNS = (128, 256, 512, 1024, 2048)
_DEPTHS = (64, 128, 192, 256, 384, 512, 768)
_WHOLE = 1 << 20
Move = dict[str, Any]


def default_product(module: Any, problem: Problem) -> tuple[str, TileConfig]:
    """The way the default takes for a product, and its tile."""
    m, n, k = (problem.size(name) for name in "mnk")
    return product_plan(module, (m, n, k), problem.word("layout"), problem.size("threads"))


def near_products(module: Any, problem: Problem, changes: int = 2) -> list[Config]:
    """Feasible tiles of a product that differ from the default in at most so many ways; the default comes first."""
    m, n, k = (problem.size(name) for name in "mnk")
    path, default = default_product(module, problem)
    found: dict[tuple[int, ...], TileConfig] = {_effect(default, m, n, k): default}
    if path != "tiled":  # then the default's tile itself is another way to run it
        found = {(): default, **found}
    ways = _ways(module, default, m, n, k, problem.size("threads"))
    for count in range(1, changes + 1):
        for names in combinations(ways, count):
            for moves in product(*(ways[name] for name in names)):
                tile = _moved(default, moves, m, n)
                key = _effect(tile, m, n, k)
                if key not in found and _feasible(module, tile, m, n, k, problem):
                    found[key] = tile
    return list(dict.fromkeys(map(product_config, found.values())))


def _feasible(module: Any, tile: TileConfig, m: int, n: int, k: int, problem: Problem) -> bool:
    return module.gemm_tile_problem(tile, m, n, k, problem.word("layout")[1] == "t") is None


def _ways(module: Any, default: TileConfig, m: int, n: int, k: int, threads: int) -> dict[str, list[Move]]:
    """What may change, and into what."""
    grids = [(t, threads // t) for t in range(1, threads + 1) if threads % t == 0]
    return {
        "packing": [
            {"pack_a": a, "pack_b": b}
            for a, b in product((False, True), repeat=2)
            if (a, b) != (default.pack_a, default.pack_b)
        ],
        "rows": [{"mc": size} for size in (*_below(_ROWS, m), _WHOLE)],
        "columns": [{"nc": size} for size in (*_below(_COLUMNS, n), _WHOLE)],
        "depth": [{"kc": size} for size in (*_below(_DEPTHS, k), k)],
        "registers": [{"mr": mr, "nr": nr} for mr, nr in _registers(module) if (mr, nr) != (default.mr, default.nr)],
        "grid": [{"threads_m": tm, "threads_n": tn} for tm, tn in grids] if threads > 1 else [],
    }


def _below(sizes: Sequence[int], extent: int) -> list[int]:
    return [size for size in sizes if size < extent]


def _registers(module: Any) -> Iterator[tuple[int, int]]:
    """For each width the tallest tile, and one of about two thirds."""
    for mr, nr, tallest in register_tiles(module):
        if mr in (tallest, max(1, tallest * 2 // 3)):
            yield mr, nr


def _moved(default: TileConfig, moves: Sequence[Move], m: int, n: int) -> TileConfig:
    values = {name: getattr(default, name) for name in TileConfig.__slots__}
    for move in moves:
        values |= move
    mr, nr = values["mr"], values["nr"]
    values["mc"] = _whole_steps(min(values["mc"], m), mr)
    values["nc"] = _whole_steps(min(values["nc"], n), nr)
    return TileConfig(**values)


def _whole_steps(size: int, step: int) -> int:
    return max(1, -(-size // step)) * step


def _effect(tile: TileConfig, m: int, n: int, k: int) -> tuple[int, ...]:
    """What a tile comes to at these sizes: blocks larger than a matrix are all the same."""
    blocks = min(tile.mc, _whole_steps(m, tile.mr)), min(tile.nc, _whole_steps(n, tile.nr)), min(tile.kc, k)
    return (tile.mr, tile.nr, *blocks, tile.pack_a, tile.pack_b, tile.threads_m, tile.threads_n)
