"""This CPU as a device of the tuner: families of the native kernels, their tiles, and trials.

A trial has the operands of one problem. Each configuration is first checked against NumPy, then timed interleaved with
the default: default, configuration, default, configuration, ... Its runtime is the default's multiplied by the median
ratio, which cancels drift of the clock frequency. Configurations that are close together are timed again, interleaved.
In a worker process, a configuration that crashes or hangs only ends that process; the tuner continues.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tilewise import __version__
from tilewise._system import real_cores
from tilewise.backend.tiled import TILED, tiled_op
from tilewise.profile.timing.clock import time_interleaved
from tilewise.profile.timing.workers import Worker, WorkerLostError, wait_any
from tilewise.store.problem import Config, Problem, Value
from tilewise.tune.choose.cache import Decision
from tilewise.tune.choose.scores import MARGIN
from tilewise.tune.choose.tuned_table import TunedTable
from tilewise.tune.families.cpu.family import Array, get_family, is_right, product_config, require_native
from tilewise.tune.families.cpu.matmul import Matmul, near_products
from tilewise.tune.families.space import ConfigTable
from tilewise.tune.measure import Trial, TrialResult
from tilewise.tune.measure.confirm import ConfirmedGain, OtherProcesses
from tilewise.tune.measure.cpu.clock import describe, nanoseconds, one_run, running_on
from tilewise.tune.measure.device import TuningDevice

COLLECTION = "cpu"
_SWEEP_NS, _SWEEP_ROUNDS = 1.0e6, 3  # of a sweep: length of a reading, and readings per configuration; arbitrary
MIN_WORK, MAX_WORK = 100_000, 9_000_000_000  # multiplications; the range of the CPU collection with a small margin


class CpuDevice(TuningDevice):
    """The native kernels of this CPU. With `limit_s`, configurations are measured in a worker process."""

    version = __version__
    margin = MARGIN

    def __init__(self, limit_s: float | None = None) -> None:
        super().__init__("cpu", describe(), COLLECTION)
        self.limit_s = limit_s
        self._other_processes = OtherProcesses()

    def problem(self, spec: Mapping[str, Value]) -> Problem:
        """Complete a problem as the framework would run it.

        It gets the current number of threads if it has none, and one thread if it is too small to split.
        """
        problem = super().problem({"threads": require_native().num_threads(), **spec})
        if problem.family == "matmul" and problem.size("threads") > 1 and not _uses_threads(self.default(problem)):
            return Problem({**problem, "threads": 1})
        return problem

    def elsewhere(self, problem: Problem, config: Config) -> list[tuple[Problem, Config]]:
        """List the same product at other thread counts that would use this tile: one thread and all cores."""
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
        """List the configurations that a choice without measuring considers, few enough to rank during a call.

        For products far outside the measured range of sizes that is the default alone.
        """
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
        """Tell whether the native kernels accept a configuration for this problem."""
        if problem.family not in TILED:
            return True
        op, key = tiled_op(problem.family), tiled_op(problem.family).key(problem)
        return key is None or op.infeasible_reason(require_native(), op.tile(config), key[0], key[2]) is None

    def default(self, problem: Problem) -> Config:
        family = get_family(problem.family)
        return family.default(problem) if isinstance(family, Matmul) else super().default(problem)

    def configs(self, problem: Problem) -> Sequence[Config]:
        """List the configurations to choose from, including the tiles that the native default may pick."""
        with running_on(problem.threads):
            configs = get_family(problem.family).configs(problem)
        if problem.family != "matmul":
            return configs
        return list(dict.fromkeys([configs[0], *near_products(require_native(), problem), *configs]))

    @contextlib.contextmanager
    def trial(self, problem: Problem, default: Config) -> Iterator[Trial]:
        """Open a trial: in a worker process if configurations have a time limit, else in this process."""
        if self.limit_s is None:
            yield CpuTrial(problem, default)
            return
        with cpu_worker() as worker:
            yield WorkerTrial(worker, problem, default, self.limit_s)

    def confirm(self, problem: Problem, config: Config) -> ConfirmedGain:
        """Compare a configuration with the default again, in other processes."""
        return self._other_processes.confirm(problem, self.default(problem), config, self.confirmation_seed)

    def sweep(self, problem: Problem, configs: Sequence[Config]) -> tuple[dict[Config, float], float]:
        """Time every configuration in three rounds; return the minimum ns of each, and the total seconds."""
        start = time.perf_counter()
        family, rng = get_family(problem.family), np.random.default_rng(0)
        operands = family.operands(problem, rng)
        times: dict[Config, list[float]] = {config: [] for config in configs}
        with running_on(problem.threads):
            runs = {config: family.runner(problem, config, operands) for config in configs}
            rough = {config: nanoseconds(run, 1) for config, run in runs.items()}
            for _ in range(_SWEEP_ROUNDS):
                for index in rng.permutation(len(configs)):
                    config = configs[index]
                    calls = int(min(max(_SWEEP_NS / rough[config], 1), 100))
                    times[config].append(nanoseconds(runs[config], calls))
        return {config: min(readings) for config, readings in times.items()}, time.perf_counter() - start


def _uses_threads(config: Config) -> bool:
    """Tell whether the tile splits the work over several threads."""
    return config.size("threads_m") * config.size("threads_n") > 1


_UNIT_NS = 4.0e5  # per reading; short, so that a disturbance affects the default and the configuration alike
_ROUNDS = 17  # readings of each; odd, for the median
_MAX_CALLS = 200  # per reading; arbitrary
_SLOW_NS = 2.0e7  # longer readings get fewer rounds; arbitrary
START_SECONDS = 60.0  # extra time limit for the start of a worker process and its first check


class CpuTrial:
    """Times configurations in the current process (no isolation, no time limit)."""

    def __init__(self, problem: Problem, default: Config, seed: int = 0) -> None:
        """Draw operands with `seed`, compute the correct result, and prepare the default configuration."""
        self.family, self.problem, self.default = get_family(problem.family), problem, default
        rng = np.random.default_rng(seed)
        self._operands = self.family.operands(problem, rng)
        self._expected = self.family.expected(problem, self._operands)
        self._default_run = self.family.runner(problem, default, self._operands)
        self._default_ns: float | None = None  # from the first trial; all results are scaled to it, since clocks drift

    def measure(self, config: Config) -> TrialResult:
        """Check a configuration against NumPy, then time it interleaved with the default."""
        with running_on(self.problem.threads):
            try:
                run = self.family.runner(self.problem, config, self._operands)
                result = run()
            except Exception as error:  # a kernel may raise anything; it fails this configuration
                return TrialResult(None, None, "failed", f"{type(error).__name__}: {error}"[:300])
            if not is_right(result, self._expected):
                return TrialResult(None, None, "wrong", "the result differs from NumPy's")
            return self._time(run)

    def _time(self, run: Callable[[], Array]) -> TrialResult:
        """Time a configuration interleaved with the default, and scale by the default's first time."""
        self._default_run()
        rough_ns = min(one_run(run), one_run(run))
        calls = int(min(max(_UNIT_NS / rough_ns, 1), _MAX_CALLS))
        rounds = _ROUNDS if rough_ns * calls < _SLOW_NS else 3
        defaults, times = time_interleaved([self._default_run, run], rounds, calls=calls, warmup=0)
        ratio = statistics.median(a / b for a, b in zip(times, defaults, strict=True))
        steady = min(times) / min(defaults)  # ratio of the fastest readings, which were not disturbed
        self._default_ns = self._default_ns or 1e9 * min(defaults)
        return TrialResult(self._default_ns * min(ratio, 1.03 * steady), self._default_ns)

    def remeasure(self, configs: Sequence[Config]) -> Sequence[float | None]:
        """Time configurations and the default interleaved; return the median of each one's faster half."""
        assert self._default_ns is not None
        with running_on(self.problem.threads):
            runs = [self._default_run, *(self.family.runner(self.problem, c, self._operands) for c in configs)]
            rounds = 5 if max(map(one_run, runs)) > _SLOW_NS else 2 * _ROUNDS
            calls = [int(min(max(_UNIT_NS / one_run(run), 1), _MAX_CALLS)) for run in runs]
            interleaved = time_interleaved(runs, rounds, calls=calls, warmup=0)
        medians = [statistics.median(sorted(times)[: len(times) // 2 + 1]) for times in interleaved]
        return [self._default_ns * seconds / medians[0] for seconds in medians[1:]]


class WorkerTrial:
    """Times configurations in a worker process that may crash; each is stopped after `limit_s` seconds."""

    def __init__(self, worker: Worker, problem: Problem, default: Config, limit_s: float, seed: int = 0) -> None:
        self._worker, self._task, self.limit_s = worker, (problem.key, default.key, seed), limit_s
        self._is_warm = False

    def measure(self, config: Config) -> TrialResult:
        """Measure a configuration in the worker; the status is "failed" if the worker crashes or hangs."""
        seconds = self.limit_s + (0.0 if self._is_warm else START_SECONDS)
        self._worker.submit((*self._task, config.key), seconds)
        messages: list[Any] = []
        while not messages:
            messages = [message for _, message in wait_any([self._worker], 0.5)]
        self._worker.finish()
        self._is_warm = not isinstance(messages[0], WorkerLostError)
        if not self._is_warm:
            return TrialResult(None, None, "failed", f"this configuration ended its process: {messages[0]}")
        return TrialResult(*messages[0])

    def remeasure(self, configs: Sequence[Config]) -> Sequence[float | None]:
        return [self.measure(config).runtime_ns for config in configs]


def serve(connection: Any, plugins: tuple[str, ...] = ()) -> None:
    """Main loop of the worker: receive (problem, default, seed, configuration), send a TrialResult's values."""
    for name in plugins:
        __import__(name)
    trials: dict[tuple[str, str, int], CpuTrial] = {}
    while True:
        problem, default, seed, config = connection.recv()
        key = (problem, default, seed)
        try:
            if key not in trials:
                trials.clear()
                trials[key] = CpuTrial(Problem(json.loads(problem)), Config.parse(default), seed)
            trial_result = trials[key].measure(Config.parse(config))
        except Exception as error:  # reported to the parent, which continues
            trial_result = TrialResult(None, None, "failed", f"{type(error).__name__}: {error}"[:300])
        connection.send((trial_result.runtime_ns, trial_result.default_ns, trial_result.status, trial_result.reason))


@contextlib.contextmanager
def cpu_worker(plugins: tuple[str, ...] = ()) -> Iterator[Worker]:
    """Provide a worker process inside the block; it loads these plug-ins."""
    worker = Worker(serve, plugins)
    try:
        yield worker
    finally:
        worker.stop()
