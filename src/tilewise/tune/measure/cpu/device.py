"""This CPU as the tuner sees it: its native kernels' families, their tiles, and trials of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tilewise import __version__
from tilewise._system import real_cores
from tilewise.tune.choose.cache import Choice
from tilewise.tune.choose.first import first_config, first_tile
from tilewise.tune.choose.kept import KeptTiles
from tilewise.tune.choose.near import near_products
from tilewise.tune.choose.scores import MARGIN, Guide
from tilewise.tune.families.cpu.family import CpuFamily, get_family
from tilewise.tune.families.cpu.matmul import Matmul
from tilewise.tune.families.cpu.tiles import product_config
from tilewise.tune.measure.cpu.clock import describe, require_native, running_on
from tilewise.tune.measure.device import FamilyBench
from tilewise.tune.measure.trial import CpuTrial, Trial, WorkerTrial, cpu_worker
from tilewise.tune.problem import Config, Problem, Value
from tilewise.tune.search.gaussian_process import BLIND, Numbers, Prior

COLLECTION = "cpu"
# Without a model: how much slower a tile is thought to be that differs from the default in one way, in two, in more;
# and a process that lets a reading speak for few others. Set on products of an AVX2 machine by five measurements each.
_NEAR = (0.02, 0.04, 0.3)
_NEAR_PRIOR = dataclasses.replace(BLIND, slope_error=0.3, spread=0.12, length=0.7, own=0.05, noise=0.015)


class CpuBench(FamilyBench[CpuFamily]):
    """Problems of the native kernels. With `limit_s` they are measured in a process of their own."""

    version = __version__
    margin = MARGIN

    def __init__(self, limit_s: float | None = None) -> None:
        super().__init__("cpu", describe(), get_family, COLLECTION)
        self.limit_s = limit_s

    def problem(self, spec: Mapping[str, Value]) -> Problem:
        """As the framework would run it: on the threads in force, if it does not say; on one where it is too small to
        share, whatever it says."""
        problem = super().problem({"threads": require_native().num_threads(), **spec})
        if problem.family == "matmul" and problem.size("threads") > 1 and not _shared(self.default(problem)):
            return Problem({**problem, "threads": 1})
        return problem

    def elsewhere(self, problem: Problem, config: Config) -> list[tuple[Problem, Config]]:
        """A product's tile that is used at other thread counts too, as it will be used at the least and the most."""
        if problem.family != "matmul":
            return []
        kept, found = KeptTiles(require_native(), [Choice(problem, config, 1.0, 1, False)]), []
        for (threads, _), tile in kept.tiles.items():
            there = Problem({**problem, "threads": threads})
            unshared = not _shared(self.default(there)) and not _shared(self.default(problem))  # runs there as here
            if threads in (1, real_cores()) and there != problem and tile is not None and not unshared:
                found.append((there, product_config(tile)))
        return found

    def first_choice(self, problem: Problem, guide: Guide) -> tuple[bool, Config | None]:
        if problem.family == "matmul":
            sizes, threads = _sizes(problem), problem.size("threads")
            tile = first_tile(require_native(), guide, sizes, problem.word("layout"), threads)
            return True, None if tile is None else product_config(tile)
        if problem.family == "int8_matmul":  # the default, which the framework's chooser keeps there
            return True, None
        return True, first_config(guide, get_family(problem.family), problem, self.configs(problem))

    def start(self, problem: Problem, configs: Sequence[Config]) -> tuple[Numbers, Prior] | None:
        """Tiles that differ from the default in one way first, then in two: there the gain is, if there is one."""
        if problem.family != "matmul":
            return None
        near = [set(near_products(require_native(), problem, changes)) for changes in (1, 2)]
        ahead = [0.0 if not i else _NEAR[sum(config not in some for some in near)] for i, config in enumerate(configs)]
        return np.array(ahead), _NEAR_PRIOR

    def default(self, problem: Problem) -> Config:
        family = get_family(problem.family)
        return family.default(problem) if isinstance(family, Matmul) else super().default(problem)

    def configs(self, problem: Problem) -> Sequence[Config]:
        with running_on(problem.size("threads") if "threads" in problem else 1):
            every = get_family(problem.family).configs(problem)
        if problem.family != "matmul":
            return every
        return list(dict.fromkeys([every[0], *near_products(require_native(), problem), *every]))

    def forget(self) -> None:
        """Nothing is compiled at run time."""

    @contextlib.contextmanager
    def trial(self, problem: Problem, default: Config) -> Iterator[Trial]:
        if self.limit_s is None:
            yield CpuTrial(problem, default)
            return
        with cpu_worker() as worker:
            yield WorkerTrial(worker, problem, default, self.limit_s)


def _shared(config: Config) -> bool:
    return config.size("threads_m") * config.size("threads_n") > 1


def _sizes(problem: Problem) -> tuple[int, int, int]:
    return problem.size("m"), problem.size("n"), problem.size("k")
