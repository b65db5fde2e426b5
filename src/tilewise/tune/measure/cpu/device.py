"""This CPU as a device of the tuner: families of the native kernels, their tiles, and trials."""

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
from tilewise.tune.families.cpu.family import get_family, product_config
from tilewise.tune.families.cpu.matmul import Matmul, near_products
from tilewise.tune.families.space import ConfigTable
from tilewise.tune.measure import Trial
from tilewise.tune.measure.confirm import ConfirmedGain, SecondProcess
from tilewise.tune.measure.cpu.clock import describe, nanoseconds, require_native, running_on
from tilewise.tune.measure.device import TuningDevice
from tilewise.tune.measure.trial import CpuTrial, WorkerTrial, cpu_worker

COLLECTION = "cpu"
_UNIT_NS, _ROUNDS = 1.0e6, 3  # of a sweep: length of a reading, and readings per configuration; arbitrary
MIN_WORK, MAX_WORK = 100_000, 9_000_000_000  # multiplications; the range of the CPU collection with a small margin


class CpuDevice(TuningDevice):
    """The native kernels of this CPU. With `limit_s`, configurations are measured in a worker process."""

    version = __version__
    margin = MARGIN

    def __init__(self, limit_s: float | None = None) -> None:
        super().__init__("cpu", describe(), COLLECTION)
        self.limit_s = limit_s
        self._second_process = SecondProcess()

    def problem(self, spec: Mapping[str, Value]) -> Problem:
        """Complete a problem as the framework would run it: with the current number of threads if it has none, and with
        one thread if it is too small to split."""
        problem = super().problem({"threads": require_native().num_threads(), **spec})
        if problem.family == "matmul" and problem.size("threads") > 1 and not _uses_threads(self.default(problem)):
            return Problem({**problem, "threads": 1})
        return problem

    def elsewhere(self, problem: Problem, config: Config) -> list[tuple[Problem, Config]]:
        """Uses of a product's tile at other thread counts; only one thread and all cores are checked."""
        if problem.family != "matmul":
            return []
        table, uses = TunedTable(require_native(), [Decision(problem, config, "cache")]), []
        for (threads, _), tile in table.tiles.items():
            other = Problem({**problem, "threads": threads})
            is_single_threaded = not _uses_threads(self.default(other)) and not _uses_threads(self.default(problem))
            if threads in (1, real_cores()) and other != problem and tile is not None and not is_single_threaded:
                uses.append((other, product_config(tile)))
        return uses

    def candidates(self, problem: Problem) -> Sequence[Config]:
        """Candidates of an unmeasured choice: for tiled operations few enough to rank during a call, and only the
        default for products far outside the measured range of sizes."""
        if problem.family not in TILED:
            return self.configs(problem)
        module, op, threads = require_native(), tiled_op(problem.family), problem.threads
        key = op.key(problem)
        assert key is not None
        with running_on(threads) if threads != module.num_threads() else contextlib.nullcontext():
            tiles = op.quick_candidates(module, key[0], key[2], threads)
        if problem.family == "matmul" and not MIN_WORK <= math.prod(key[0]) <= MAX_WORK:
            tiles = tiles[:1]
        return ConfigTable(op.names, tiles)

    def runs(self, problem: Problem, config: Config) -> bool:
        """True if the native kernels accept the tile for this problem."""
        if problem.family not in TILED:
            return True
        op, key = tiled_op(problem.family), tiled_op(problem.family).key(problem)
        return key is None or op.infeasible_reason(require_native(), op.tile(config), key[0], key[2]) is None

    def default(self, problem: Problem) -> Config:
        family = get_family(problem.family)
        return family.default(problem) if isinstance(family, Matmul) else super().default(problem)

    def configs(self, problem: Problem) -> Sequence[Config]:
        """List the configurations to choose from; products include the tiles of the native default."""
        with running_on(problem.threads):
            configs = get_family(problem.family).configs(problem)
        if problem.family != "matmul":
            return configs
        return list(dict.fromkeys([configs[0], *near_products(require_native(), problem), *configs]))

    @contextlib.contextmanager
    def trial(self, problem: Problem, default: Config) -> Iterator[Trial]:
        """Open a trial: in a worker process if there is a time limit, else in this process."""
        if self.limit_s is None:
            yield CpuTrial(problem, default)
            return
        with cpu_worker() as worker:
            yield WorkerTrial(worker, problem, default, self.limit_s)

    def confirm(self, problem: Problem, config: Config) -> ConfirmedGain:
        """Repeat the comparison with the default in a second process."""
        return self._second_process.confirm(problem, self.default(problem), config, self.confirmation_seed)

    def sweep(self, problem: Problem, configs: Sequence[Config]) -> tuple[dict[Config, float], float]:
        """Time every configuration in three rounds; return the fastest readings and the seconds of the sweep."""
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
        return {config: min(readings) for config, readings in times.items()}, time.perf_counter() - start


def _uses_threads(config: Config) -> bool:
    """True if the tile splits the work over threads."""
    return config.size("threads_m") * config.size("threads_n") > 1
