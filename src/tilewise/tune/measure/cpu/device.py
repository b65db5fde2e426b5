"""This CPU as the tuner sees it: its native kernels' families, their tiles, and trials of them."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tilewise import __version__
from tilewise._system import real_cores
from tilewise.backend.tiled import TILED, tiled_op
from tilewise.store.problem import Config, Problem, Value
from tilewise.tune.choose.cache import Decision
from tilewise.tune.choose.scores import MARGIN
from tilewise.tune.choose.tuned_table import TunedTable
from tilewise.tune.families.cpu.family import get_family
from tilewise.tune.families.cpu.matmul import Matmul
from tilewise.tune.families.cpu.near import near_products
from tilewise.tune.families.cpu.tiles import product_config
from tilewise.tune.families.space import ConfigTable
from tilewise.tune.measure.cpu.clock import describe, nanoseconds, require_native, running_on
from tilewise.tune.measure.device import Device
from tilewise.tune.measure.trial import CpuTrial, Trial, WorkerTrial, cpu_worker

COLLECTION = "cpu"
_UNIT_NS, _ROUNDS = 1.0e6, 3  # of a sweep: as many rounds as a collector makes at least
LEAST_WORK, MOST_WORK = 100_000, 9_000_000_000  # multiplications; the collection's own range, and a little around it


class CpuDevice(Device):
    """Problems of the native kernels. With `limit_s` they are measured in a process of their own."""

    version = __version__
    margin = MARGIN

    def __init__(self, limit_s: float | None = None) -> None:
        super().__init__("cpu", describe(), COLLECTION)
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
        kept, found = TunedTable(require_native(), [Decision(problem, config, "cache")]), []
        for (threads, _), tile in kept.tiles.items():
            there = Problem({**problem, "threads": threads})
            unshared = not _shared(self.default(there)) and not _shared(self.default(problem))  # runs there as here
            if threads in (1, real_cores()) and there != problem and tile is not None and not unshared:
                found.append((there, product_config(tile)))
        return found

    def candidates(self, problem: Problem) -> Sequence[Config]:
        """Of a tiled operation, few enough to be ranked in passing; the default alone far outside the sizes that were
        ever measured. Integer products keep theirs until one was measured."""
        if problem.family not in TILED:
            return self.configs(problem)
        module, op, threads = require_native(), tiled_op(problem.family), problem.threads
        key = op.key(problem)
        assert key is not None
        with running_on(threads) if threads != module.num_threads() else contextlib.nullcontext():
            listed = op.quick_candidates(module, key[0], key[2], threads)
        if problem.family == "matmul" and not LEAST_WORK <= math.prod(key[0]) <= MOST_WORK:
            listed = listed[:1]
        return ConfigTable(op.names, listed)

    def runs(self, problem: Problem, config: Config) -> bool:
        if problem.family not in TILED:
            return True
        op, key = tiled_op(problem.family), tiled_op(problem.family).key(problem)
        return key is None or op.infeasible_reason(require_native(), op.tile(config), key[0], key[2]) is None

    def default(self, problem: Problem) -> Config:
        family = get_family(problem.family)
        return family.default(problem) if isinstance(family, Matmul) else super().default(problem)

    def configs(self, problem: Problem) -> Sequence[Config]:
        with running_on(problem.threads):
            every = get_family(problem.family).configs(problem)
        if problem.family != "matmul":
            return every
        return list(dict.fromkeys([every[0], *near_products(require_native(), problem), *every]))

    @contextlib.contextmanager
    def trial(self, problem: Problem, default: Config) -> Iterator[Trial]:
        if self.limit_s is None:
            yield CpuTrial(problem, default)
            return
        with cpu_worker() as worker:
            yield WorkerTrial(worker, problem, default, self.limit_s)

    def sweep(self, problem: Problem, configs: Sequence[Config]) -> tuple[dict[Config, float], float]:
        """The fastest of three rounds each, and how long all of it took."""
        start = time.perf_counter()
        family, rng = get_family(problem.family), np.random.default_rng(0)
        operands = family.operands(problem, rng)
        times: dict[Config, list[float]] = {config: [] for config in configs}
        with running_on(problem.threads):
            runs = {config: family.runner(problem, config, operands) for config in configs}
            rough = {config: nanoseconds(run, 1) for config, run in runs.items()}
            for _ in range(_ROUNDS):
                for index in rng.permutation(len(configs)):
                    config = configs[index]
                    calls = int(min(max(_UNIT_NS / rough[config], 1), 100))
                    times[config].append(nanoseconds(runs[config], calls))
        return {config: min(taken) for config, taken in times.items()}, time.perf_counter() - start


def _shared(config: Config) -> bool:
    return config.size("threads_m") * config.size("threads_n") > 1
