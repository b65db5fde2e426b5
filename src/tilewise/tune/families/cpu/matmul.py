"""The CPU families `matmul` and `batched_matmul`: the native product with its tile as the configuration.

A layout has one letter per operand: n for row-major, t for transposed in memory; transposed operands are views and are
not copied. The number of threads belongs to the problem; the split of the result over threads belongs to the
configuration.

`near_products` lists the neighborhood of the default tile, where most gains over a good default are found; it is small
enough to rank in a millisecond. The default derives the register tile, the blocks and the packing from the cache sizes.
If it is not the fastest, then usually a tile that differs in one or two of these is: other blocks, a matrix packed or
not, another register tile, another thread grid. The neighborhood varies the default's own values, which a regular grid
does not contain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np

from tilewise.backend.gemm import matmul_native
from tilewise.backend.numpy_ops import erf
from tilewise.backend.tiled import tile_space
from tilewise.backend.tiled.matmul import TileConfig, product_plan, register_tiles
from tilewise.costmodel.hlo.graph import KernelGraph
from tilewise.costmodel.hlo.operations import matmul_graph
from tilewise.errors import ConfigurationError
from tilewise.store.problem import Config, Problem, Value, read_spec
from tilewise.tune.families.cpu.family import (
    THREADS,
    Array,
    aligned_copies,
    normal,
    product_blocks,
    product_config,
    require_native,
)
from tilewise.tune.families.cpu.family import product_config as config_of
from tilewise.tune.families.cpu.family import product_tile as tile_of
from tilewise.tune.families.registry import Expected

EPILOGUES = ("none", "bias", "bias_relu", "bias_gelu", "residual")
LAYOUTS = ("nn", "nt", "tn", "tt")
MAX_MULTIPLICATIONS = 1 << 33  # larger problems take too long to measure

# Block sizes to try; arbitrary, about a factor of two apart.
_ROWS = (28, 56, 112, 224, 448)
_COLUMNS = (128, 256, 512, 1024, 2048)
_DEPTHS = (64, 128, 192, 256, 384, 512, 768)
_WHOLE_EXTENT = 1 << 20  # a block larger than any matrix
Move = dict[str, Any]


class Matmul:
    """c = epilogue(a @ b): a (m, k), b (k, n), float32."""

    name = "matmul"
    takes_columns = True
    sizes: tuple[str, ...] = ("m", "n", "k")
    choices: Mapping[str, Sequence[Value]] = {
        "dtype": ("fp32",),
        "epilogue": EPILOGUES,
        "layout": LAYOUTS,
        "threads": THREADS,
    }

    def problem(self, spec: Mapping[str, Value]) -> Problem:
        """Check a specification's sizes and fill in its defaults."""
        problem = read_spec(self.name, spec, self.sizes, self.choices)
        batch, m, n, k = _sizes(problem)
        if max(batch, 1) * m * n * k > MAX_MULTIPLICATIONS:
            raise ConfigurationError(f"A {self.name} of {max(batch, 1)} x {m} x {n} x {k} is too large to measure.")
        return problem

    def configs(self, problem: Problem) -> Sequence[Config]:
        """List all feasible tiles, the default first."""
        _, m, n, k = _sizes(problem)
        layout, threads = problem.word("layout"), problem.size("threads")
        default = self.default(problem)
        space = tile_space("matmul", (m, n, k), layout=layout, threads=threads)
        return [default, *(config for config in map(config_of, space) if config != default)]

    def default(self, problem: Problem) -> Config:
        """Return the default tile alone; its operands are allocated but never touched, so this is cheap."""
        operands = _views(problem, functools.partial(np.empty, dtype=np.float32))
        return config_of(TileConfig(*require_native().matmul_plan(*operands, problem.size("threads"))[1]))

    def operands(self, problem: Problem, rng: np.random.Generator) -> Mapping[str, Array]:
        """Draw normally distributed matrices in the problem's layout, and the epilogue's operands."""
        batch, m, n, _ = _sizes(problem)
        draw = functools.partial(normal, rng)
        a, b = _views(problem, draw)
        shape = (batch, m, n) if batch else (m, n)
        operands = {"a": a, "b": b}
        if "bias" in problem.word("epilogue"):
            operands["bias"] = draw((n,))
        if problem.word("epilogue") == "residual":
            operands["residual"] = draw(shape)
        return aligned_copies(operands)

    def expected(self, problem: Problem, operands: Mapping[str, Array]) -> Expected:
        """Compute the product and its epilogue in float64; return it with its tolerance."""
        value = np.matmul(operands["a"].astype(np.float64), operands["b"].astype(np.float64))
        for name in ("bias", "residual"):
            if name in operands:
                value = value + operands[name]
        if problem.word("epilogue") == "bias_relu":
            value = np.maximum(value, 0)
        if problem.word("epilogue") == "bias_gelu":
            value = value * 0.5 * (1 + erf(value / np.sqrt(2)))
        # Rounding of k additions in any order grows like k eps; one lost product would cost about 0.5.
        return Expected(value, 1e-5 + 3e-7 * problem.size("k"))

    def runner(self, problem: Problem, config: Config, operands: Mapping[str, Array]) -> Callable[[], Array]:
        """Return a function that computes the product with a configuration, exactly as the framework would.

        The default configuration passes no tile, because the default may use another algorithm than the tiled loops.
        Other tiles are checked and prepared once, so that their timings contain only the product.
        """
        module, tile, a, b = require_native(), tile_of(config), operands["a"], operands["b"]
        if tile == TileConfig(*module.matmul_plan(a, b, problem.size("threads"))[1]):
            prepared = None
        else:
            prepared = module.prepared_tile(tile)
        words = problem.word("epilogue").split("_")
        extras: dict[str, Any] = {name: operands[name] for name in ("bias", "residual") if name in operands}
        if words[-1] in ("relu", "gelu"):
            extras["activation"] = words[-1]
        return lambda: matmul_native(a, b, prepared, **extras)

    def graph(self, problem: Problem) -> KernelGraph:
        return matmul_graph(problem.word("dtype"), _sizes(problem), problem.word("layout"), problem.word("epilogue"))

    def tile(self, problem: Problem, config: Config) -> Mapping[str, Sequence[int]]:
        return product_blocks(problem, config)


def batched_matmul() -> Matmul:
    """Return the kernel family of batched products, c[i] = a[i] @ b[i]: problems, configurations and data."""
    family = Matmul()
    family.name, family.sizes = "batched_matmul", ("batch", "m", "n", "k")
    return family


def _sizes(problem: Problem) -> tuple[int, int, int, int]:
    """Return (batch, m, n, k); batch is 0 for a single product."""
    batch = problem.size("batch") if "batch" in problem else 0
    return batch, problem.size("m"), problem.size("n"), problem.size("k")


def _views(problem: Problem, make: Callable[[Sequence[int]], Array]) -> tuple[Array, Array]:
    """Create both operands by `make(shape)`; return views of shape (m, k) and (k, n) in the problem's layout."""
    batch, m, n, k = _sizes(problem)
    layout = problem.word("layout")
    lead = (batch,) if batch else ()
    a = make((*lead, k, m)).swapaxes(-1, -2) if layout[0] == "t" else make((*lead, m, k))
    b = make((*lead, n, k)).swapaxes(-1, -2) if layout[1] == "t" else make((*lead, k, n))
    return a, b


def near_products(module: Any, problem: Problem) -> list[Config]:
    """List feasible tiles that differ from the default in one or two settings, the default first."""
    m, n, k = (problem.size(name) for name in "mnk")
    layout, threads = problem.word("layout"), problem.size("threads")
    path, default = product_plan(module, (m, n, k), layout, threads)
    tiles: dict[tuple[int, ...], TileConfig] = {_effective_tile(default, m, n, k): default}
    if path != "tiled":  # the default runs another algorithm, so its tile is one more candidate
        tiles = {(): default, **tiles}
    alternatives = _alternatives(module, default, m, n, k, threads)
    for count in (1, 2):
        for names in combinations(alternatives, count):
            for moves in product(*(alternatives[name] for name in names)):
                tile = _apply_moves(default, moves, m, n)
                key = _effective_tile(tile, m, n, k)
                if key not in tiles and module.gemm_tile_problem(tile, m, n, k, layout[1] == "t") is None:
                    tiles[key] = tile
    return list(dict.fromkeys(map(product_config, tiles.values())))


def _alternatives(module: Any, default: TileConfig, m: int, n: int, k: int, threads: int) -> dict[str, list[Move]]:
    """Return alternative values for each setting of the default tile (register tile, block sizes, ...)."""
    grids = [(t, threads // t) for t in range(1, threads + 1) if threads % t == 0]
    # The tallest register tile of each width, and one of about two thirds of its height.
    registers = [(mr, nr) for mr, nr, tallest in register_tiles(module) if mr in (tallest, max(1, tallest * 2 // 3))]
    return {
        "packing": [
            {"pack_a": a, "pack_b": b}
            for a, b in product((False, True), repeat=2)
            if (a, b) != (default.pack_a, default.pack_b)
        ],
        "rows": [{"mc": size} for size in (*_below(_ROWS, m), _WHOLE_EXTENT)],
        "columns": [{"nc": size} for size in (*_below(_COLUMNS, n), _WHOLE_EXTENT)],
        "depth": [{"kc": size} for size in (*_below(_DEPTHS, k), k)],
        "registers": [{"mr": mr, "nr": nr} for mr, nr in registers if (mr, nr) != (default.mr, default.nr)],
        "grid": [{"threads_m": tm, "threads_n": tn} for tm, tn in grids] if threads > 1 else [],
    }


def _below(sizes: Sequence[int], extent: int) -> list[int]:
    return [size for size in sizes if size < extent]


def _apply_moves(default: TileConfig, moves: Sequence[Move], m: int, n: int) -> TileConfig:
    """Return the default tile with some settings changed, its blocks rounded up to whole register tiles."""
    values = {name: getattr(default, name) for name in TileConfig.__slots__}
    for move in moves:
        values |= move
    mr, nr = values["mr"], values["nr"]
    values["mc"] = _round_up(min(values["mc"], m), mr)
    values["nc"] = _round_up(min(values["nc"], n), nr)
    return TileConfig(**values)


def _round_up(size: int, step: int) -> int:
    return max(1, -(-size // step)) * step


def _effective_tile(tile: TileConfig, m: int, n: int, k: int) -> tuple[int, ...]:
    """Return the tile with blocks cut at the matrix's sizes; tiles with equal results are equivalent."""
    blocks = min(tile.mc, _round_up(m, tile.mr)), min(tile.nc, _round_up(n, tile.nr)), min(tile.kc, k)
    return (tile.mr, tile.nr, *blocks, tile.pack_a, tile.pack_b, tile.threads_m, tile.threads_n)
