"""The tile of a kernel without measuring, as the framework's chooser and the tuner both take it.

A product's default is compared with its neighbours and with some hundred tiles that cover the space; as rows of one
array they are scored in well below a millisecond. `decide` takes the best if it promises more than the model's margin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, product
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.backend.tiled.matmul import TileConfig, around, product_plan, tile_blocks
from tilewise.costmodel.data.kernel import Kernel
from tilewise.tune.families.columns import with_machine
from tilewise.tune.families.cpu.tiles import product_config
from tilewise.tune.families.graphs import matmul_graph
from tilewise.tune.problem import Config, Problem

Rows = npt.NDArray[np.int64]  # one a row, in the order of TileConfig's fields
Sizes = tuple[int, int, int]
LEAST_WORK, MOST_WORK = 100_000, 9_000_000_000  # multiplications; the collection's own range, and a little around it
_COLUMNS = ("register_m", "register_n", "pack_a", "pack_b", "threads_m", "threads_n")


class Tiles(Sequence[Config]):
    """Tiles of a product, one a row of an array, the default first; a configuration is made of the one that is asked
    for."""

    def __init__(self, rows: Rows, problem: Problem) -> None:
        self.rows, self.problem = rows, problem

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return product_config(tile_at(self.rows[index]))

    def kernel_for(self, columns: Sequence[str], machine: Mapping[str, int]) -> Kernel:
        """What the cost model reads, for all rows at once."""
        problem = self.problem
        sizes = problem.size("m"), problem.size("n"), problem.size("k")
        return tile_kernel(sizes, problem.word("layout"), self.rows, columns, machine, problem.size("threads"))


def product_tiles(module: Any, problem: Problem) -> Tiles:
    """What a product's tile is chosen among unmeasured: the default alone where it runs no tiles, and far outside the
    sizes that were ever measured."""
    m, n, k, threads = (problem.size(name) for name in ("m", "n", "k", "threads"))
    path, default = product_plan(module, (m, n, k), problem.word("layout"), threads)
    if path != "tiled" or not LEAST_WORK <= m * n * k <= MOST_WORK:
        return Tiles(np.array([list(default.as_dict().values())], np.int64), problem)
    return Tiles(candidates(module, default, (m, n, k), threads), problem)


def candidates(module: Any, default: TileConfig, sizes: Sizes, threads: int) -> Rows:
    """The default, its neighbours and some fifty to two hundred more tiles, one a row."""
    rows = around(module, default, sizes, threads)
    rest = (default.pack_a,), (False, True), (default.threads_m,), (default.threads_n,)
    for mr, nr, *blocks in tile_blocks(module, *sizes):
        rows += product((mr,), (nr,), *blocks, *rest)
    return np.fromiter(chain.from_iterable(rows), np.int64).reshape(len(rows), -1)


def tile_at(row: npt.NDArray[np.int64]) -> TileConfig:
    mr, nr, mc, nc, kc, pack_a, pack_b, threads_m, threads_n = (int(value) for value in row)
    return TileConfig(mr, nr, mc, nc, kc, bool(pack_a), bool(pack_b), threads_m, threads_n)


def tile_kernel(
    sizes: Sizes, layout: str, tiles: Rows, columns: Sequence[str], machine: Mapping[str, int], threads: int = 1
) -> Kernel:
    """What the cost model reads: the same graph and columns as `scores.as_kernel` gives, for all tiles at once."""
    m, n, k = sizes
    rows, cols, depth = (np.minimum(tiles[:, i], size) for i, size in ((2, m), (3, n), (4, k)))
    feat = np.zeros((len(tiles), len(columns)), np.float32)
    for first, (a, b) in ((0, (depth, cols)), (8, (rows, cols)), (16, (rows, depth))):
        feat[:, first], feat[:, first + 1], feat[:, first + 6], feat[:, first + 7] = a, b, a + b, a * b
    own = dict(zip(_COLUMNS, tiles[:, [0, 1, 5, 6, 7, 8]].T, strict=True))
    for column, name in enumerate(columns[24:], start=24):
        if name in own:
            feat[:, column] = own[name]
    if machine:
        feat = with_machine(feat, columns[24:], Problem({"threads": threads}), machine, 0)
    nothing = np.zeros(len(tiles), np.int64)
    return Kernel("matmul", "matmul", *matmul_graph("fp32", (0, m, n, k), layout, "none"), feat, nothing, nothing)
