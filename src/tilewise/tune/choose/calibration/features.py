"""What the correction compares of kernels and tiles, in doublings: sizes, blocks cut to them, packing, what is wasted.

Yes and no count as so many doublings; the share of a register tile that lies beyond the matrix counts for more than its
logarithm, as it is lost for certain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tilewise.tune.choose.calibration.correction import Rows
from tilewise.tune.choose.near import default_product
from tilewise.tune.measure.cpu.clock import require_native
from tilewise.tune.problem import Config, Problem
from tilewise.tune.search.gaussian_process import Numbers

FAMILIES = ("matmul", "conv2d", "int8_matmul")
_WASTE = 10.0
_PAGE = 512  # numbers of half a page
_OTHER_WAY = 2.0
_CONV = ("batch", "channels", "height", "width", "filters", "kernel", "stride")


def size_row(problem: Problem) -> list[float]:
    """A kernel's sizes."""
    threads = 3 * math.log2(problem.size("threads"))
    if problem.family == "conv2d":
        return [*(math.log2(problem.size(name)) for name in _CONV), threads]
    sizes = [math.log2(problem.size(name)) for name in "mnk"]
    if problem.family == "int8_matmul":
        return [*sizes, threads]
    layout = problem.word("layout")
    return [*sizes, 3.0 * (layout[0] == "t"), 3.0 * (layout[1] == "t"), *_conflicts(problem, layout), threads]


def _conflicts(problem: Problem, layout: str) -> list[float]:
    """Whether rows of A and of B lie whole pages apart, so that they evict each other where they are not packed."""
    strides = problem.size("m" if layout[0] == "t" else "k"), problem.size("k" if layout[1] == "t" else "n")
    return [1.5 * (stride % _PAGE == 0) for stride in strides]


def config_row(problem: Problem, config: Config) -> list[float]:
    """A tile as it comes to at a kernel's sizes."""
    if problem.family == "conv2d":
        names = ("register_m", "register_n", "block_m", "block_n", "threads_n")
        return [2.0 * config.size("winograd"), *(math.log2(max(1, config.size(name))) for name in names)]
    m, n, k = (problem.size(name) for name in "mnk")
    mr, nr = config.size("register_m"), config.size("register_n")
    blocks = min(config.size("block_m"), m), min(config.size("block_n"), n), min(config.size("block_k"), k)
    packs = [2.0 * config.size(name) for name in ("pack_a", "pack_b") if name in config]
    row = [math.log2(mr), math.log2(nr), *(math.log2(size) for size in blocks), *packs]
    return [*row, 1.5 * math.log2(config.size("threads_m")), _WASTE * _filled(m, mr), _WASTE * _filled(n, nr)]


def _filled(size: int, step: int) -> float:
    return math.log2(size / (-(-size // step) * step))


def rows_of(problem: Problem, configs: Sequence[Config], default: Config, scores: Numbers | None = None) -> Rows:
    """Tiles of one kernel beside its default; `scores` are theirs less the default's."""
    count = len(configs)
    sizes, base = np.array(size_row(problem)), np.array([*config_row(problem, default), _way(problem)])
    config = np.array([[*config_row(problem, each), 0.0] for each in configs]).reshape(count, len(base))
    score = np.zeros(count) if scores is None else scores
    return Rows(np.tile(sizes, (count, 1)), config, np.tile(base, (count, 1)), score)


def _way(problem: Problem) -> float:
    """How far a default that runs no tiles (inner products, few rows) is from any tile."""
    tiled = problem.family != "matmul" or default_product(require_native(), problem)[0] == "tiled"
    return 0.0 if tiled else _OTHER_WAY


def joined(parts: Sequence[Rows]) -> Rows:
    return Rows(*(np.concatenate([getattr(part, name) for part in parts]) for name in Rows.__slots__))
