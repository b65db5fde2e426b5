"""The tile of a kernel without measuring, as the framework's chooser and the tuner both take it.

The model compares the default with its neighbours and with some hundred tiles that cover the space, and the best is
taken if it promises more than the model's own margin: what its promises have to exceed, on machines and shapes that it
was not taught on, to be worth taking. Otherwise the default stays, as it does where it runs no tiles at all, and far
outside the sizes that were ever measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.backend.tiled.matmul import TileConfig, around, operand_views, tile_blocks
from tilewise.costmodel.data.kernel import Kernel
from tilewise.tune.choose.scores import Guide
from tilewise.tune.families.graphs import matmul_graph
from tilewise.tune.measure.export import Described, told
from tilewise.tune.problem import Config, Problem

Tiles = npt.NDArray[np.int64]  # one a row, in the order of TileConfig's fields
Sizes = tuple[int, int, int]
LEAST_WORK, MOST_WORK = 100_000, 9_000_000_000  # multiplications; the collection's own range, and a little around it
_TRIED = 12  # of the ranking, until one is feasible
_COLUMNS = ("register_m", "register_n", "pack_a", "pack_b", "threads_m", "threads_n")


def first_tile(module: Any, guide: Guide, sizes: Sizes, layout: str, threads: int) -> TileConfig | None:
    """A product's tile to use in place of the default; None to stay with it."""
    m, n, k = sizes
    if guide.model is None or not LEAST_WORK <= m * n * k <= MOST_WORK:
        return None
    path, default = module.matmul_plan(*operand_views((m, n, k), layout), threads)
    if path != "tiled":
        return None
    tiles = candidates(module, TileConfig(*default), sizes, threads)
    scores = guide.model.score(tile_kernel(sizes, layout, tiles, guide, threads))
    for index in np.argsort(scores, kind="stable")[:_TRIED]:
        if not index or guide.prior.slope * float(scores[0] - scores[index]) < guide.margin:
            return None
        tile = tile_at(tiles[index])
        if module.gemm_tile_problem(tile, m, n, k, layout[1] == "t") is None:
            return tile
    return None


def first_config(guide: Guide, family: Described, problem: Problem, configs: Sequence[Config]) -> Config | None:
    """The same over a list of configurations, the default first."""
    scores = guide.scores(family, problem, configs)
    best = int(np.argmin(scores))
    return configs[best] if guide.prior.slope * float(scores[0] - scores[best]) >= guide.margin else None


def candidates(module: Any, default: TileConfig, sizes: Sizes, threads: int) -> Tiles:
    """The default, its neighbours and some fifty to two hundred more tiles, one a row."""
    rows = [tuple(tile.as_dict().values()) for tile in around(module, default, sizes, threads)]
    grid = default.threads_m, default.threads_n
    for mr, nr, row_blocks, column_blocks, depth_blocks in tile_blocks(module, *sizes):
        for mc, nc, kc, pack_b in product(row_blocks, column_blocks, depth_blocks, (0, 1)):
            rows.append((mr, nr, mc, nc, kc, int(default.pack_a), pack_b, *grid))
    return np.array(rows, dtype=np.int64)


def tile_at(row: npt.NDArray[np.int64]) -> TileConfig:
    mr, nr, mc, nc, kc, pack_a, pack_b, threads_m, threads_n = (int(value) for value in row)
    return TileConfig(mr, nr, mc, nc, kc, bool(pack_a), bool(pack_b), threads_m, threads_n)


def tile_kernel(sizes: Sizes, layout: str, tiles: Tiles, guide: Guide, threads: int = 1) -> Kernel:
    """What the cost model reads: the same graph and columns as `guide.as_kernel` gives, for all tiles at once."""
    m, n, k = sizes
    rows, cols, depth = (np.minimum(tiles[:, i], size) for i, size in ((2, m), (3, n), (4, k)))
    feat = np.zeros((len(tiles), len(guide.columns)), np.float32)
    for first, (a, b) in ((0, (depth, cols)), (8, (rows, cols)), (16, (rows, depth))):
        feat[:, first], feat[:, first + 1], feat[:, first + 6], feat[:, first + 7] = a, b, a + b, a * b
    own = dict(zip(_COLUMNS, tiles[:, [0, 1, 5, 6, 7, 8]].T, strict=True))
    for column, name in enumerate(guide.columns[24:], start=24):
        if name in own:
            feat[:, column] = own[name]
    if guide.machine:
        feat = told(feat, guide.columns[24:], Problem({"threads": threads}), guide.machine, 0)
    nothing = np.zeros(len(tiles), np.int64)
    return Kernel("matmul", "matmul", *matmul_graph("fp32", (0, m, n, k), layout, "none"), feat, nothing, nothing)
