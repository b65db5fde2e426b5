"""The tile of a float32 matrix product without measuring, as the framework's chooser and the tuner both take it.

Some hundred tiles that cover the space are compared with the default by a network that was taught just that (first.py),
or, for products larger than it was taught on, ranked by the collection's model; the best is taken if it is expected to
beat the analytical default by more than the model's errors. Otherwise the default stays, as it does where it runs no
tiles at all, and far outside the sizes that were ever measured. It stays, too, where threads share a product: how
evenly the work is cut decides there, which the default sees to and the shipped model is not told of. A model of one's
own (no `first`) decides alone, on any number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.backend.tiles import TileConfig
from tilewise.costmodel.kernel import Kernel
from tilewise.tune.cpu.first import FirstChoice, Tiles, candidates, tile_at, views
from tilewise.tune.guide import Guide
from tilewise.tune.operations import matmul_graph

# In logarithms of runtime. The analytical default is good; on held-out programs a model's choice that promises less
# than this is as often slower than the default as it is faster.
MARGIN = 0.045
LEAST_WORK, MOST_WORK = 100_000, 300_000_000  # multiplications; the collection's own range, and a little around it
_TRIED = 12  # of the ranking, until one is feasible
_COLUMNS = ("register_m", "register_n", "pack_a", "pack_b", "threads_m", "threads_n")
Sizes = tuple[int, int, int]


def first_tile(
    module: Any, guide: Guide, first: FirstChoice | None, sizes: Sizes, layout: str, threads: int
) -> TileConfig | None:
    """The tile to use in place of the default; None to stay with it."""
    m, n, k = sizes
    if guide.model is None or not LEAST_WORK <= m * n * k <= MOST_WORK:
        return None
    if first is not None:
        if first.covers(m * n * k, threads):
            return first.choose(module, m, n, k, layout)
        if threads > 1:
            return None
    path, default = module.matmul_plan(*views(m, n, k, layout), threads)
    if path != "tiled":
        return None
    tiles = np.vstack([np.array(default, dtype=np.int64), candidates(module, m, n, k, threads)])
    scores = guide.model.score(tile_kernel(sizes, layout, tiles, guide.columns))
    for index in np.argsort(scores, kind="stable")[:_TRIED]:
        if not index or guide.prior.slope * float(scores[0] - scores[index]) < MARGIN:
            return None
        tile = tile_at(tiles[index])
        if module.gemm_tile_problem(tile, m, n, k, layout[1] == "t") is None:
            return tile
    return None


def tile_kernel(sizes: Sizes, layout: str, tiles: Tiles, columns: tuple[str, ...]) -> Kernel:
    """What the cost model reads: the same graph and columns as `guide.as_kernel` gives, for all tiles at once."""
    m, n, k = sizes
    rows, cols, depth = (np.minimum(tiles[:, i], size) for i, size in ((2, m), (3, n), (4, k)))
    feat = np.zeros((len(tiles), len(columns)), np.float32)
    for first, (a, b) in ((0, (depth, cols)), (8, (rows, cols)), (16, (rows, depth))):
        feat[:, first], feat[:, first + 1], feat[:, first + 6], feat[:, first + 7] = a, b, a + b, a * b
    own = dict(zip(_COLUMNS, tiles[:, [0, 1, 5, 6, 7, 8]].T, strict=True))
    for column, name in enumerate(columns[24:], start=24):
        if name in own:
            feat[:, column] = own[name]
    nothing = np.zeros(len(tiles), np.int64)
    return Kernel("matmul", "matmul", *matmul_graph("fp32", (0, m, n, k), layout, "none"), feat, nothing, nothing)
