"""Trials: measure the runtime of single configurations on this CPU, in this process or in a worker process.

A trial has the operands of one problem. Each configuration is first checked against NumPy, then timed interleaved with
the default: default, configuration, default, configuration, ... Its runtime is the default's multiplied by the median
ratio, which cancels drift of the clock frequency. Configurations that are close together are timed again, interleaved.
In a worker process, a configuration that crashes or hangs only ends that process; the tuner continues.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tilewise.profile.timing.clock import time_interleaved
from tilewise.profile.timing.workers import Worker, WorkerLostError, wait_any
from tilewise.store.problem import Config, Problem
from tilewise.tune.families.cpu.family import Array, get_family, is_right
from tilewise.tune.measure import TrialResult
from tilewise.tune.measure.cpu.clock import one_run, running_on

_UNIT_NS = 4.0e5  # per reading; short, so that a disturbance affects the default and the configuration alike
_ROUNDS = 17  # readings of each; odd, for the median
_MAX_CALLS = 200  # per reading; arbitrary
_SLOW_NS = 2.0e7  # longer readings get fewer rounds; arbitrary
START_SECONDS = 60.0  # extra time limit for the start of a worker process and its first check


class CpuTrial:
    """Times configurations in the current process (no isolation, no time limit)."""

    def __init__(self, problem: Problem, default: Config, seed: int = 0) -> None:
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
            except Exception as error:  # whatever a kernel raises is this configuration's verdict
                return TrialResult(None, None, "failed", f"{type(error).__name__}: {error}"[:300])
            if not is_right(result, self._expected):
                return TrialResult(None, None, "wrong", "the result differs from NumPy's")
            return self._time(run)

    def _time(self, run: Callable[[], Array]) -> TrialResult:
        """Time a configuration and the default interleaved; scale the ratio to the first reading of the default."""
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
        """Time the configurations and the default interleaved; the median of the faster half of readings counts."""
        assert self._default_ns is not None
        with running_on(self.problem.threads):
            runs = [self._default_run, *(self.family.runner(self.problem, c, self._operands) for c in configs)]
            rounds = 5 if max(map(one_run, runs)) > _SLOW_NS else 2 * _ROUNDS
            calls = [int(min(max(_UNIT_NS / one_run(run), 1), _MAX_CALLS)) for run in runs]
            interleaved = time_interleaved(runs, rounds, calls=calls, warmup=0)
        medians = [statistics.median(sorted(times)[: len(times) // 2 + 1]) for times in interleaved]
        return [self._default_ns * seconds / medians[0] for seconds in medians[1:]]


class WorkerTrial:
    """Times configurations in a worker process that may crash; each has `limit_s` seconds."""

    def __init__(self, worker: Worker, problem: Problem, default: Config, limit_s: float, seed: int = 0) -> None:
        self._worker, self._task, self.limit_s = worker, (problem.key, default.key, seed), limit_s
        self._is_warm = False

    def measure(self, config: Config) -> TrialResult:
        """Send a configuration to the worker and wait for the result; "failed" if the process ends or hangs."""
        seconds = self.limit_s + (0.0 if self._is_warm else START_SECONDS)
        self._worker.submit((*self._task, config.key), seconds)
        while True:
            for worker, message in wait_any([self._worker], 0.5):
                worker.finish()
                if isinstance(message, WorkerLostError):
                    self._is_warm = False
                    return TrialResult(None, None, "failed", f"this configuration ended its process: {message}")
                self._is_warm = True
                return TrialResult(*message)

    def remeasure(self, configs: Sequence[Config]) -> Sequence[float | None]:
        return [self.measure(config).runtime_ns for config in configs]


def serve(connection: Any, plugins: tuple[str, ...] = ()) -> None:
    """Main loop of the worker: receive (problem, default, seed, configuration), send the values of a TrialResult."""
    import json

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
    """Run a worker process until the end of the block."""
    worker = Worker(serve, plugins)
    try:
        yield worker
    finally:
        worker.stop()
