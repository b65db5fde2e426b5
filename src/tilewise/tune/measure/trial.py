"""Trials: taking one configuration's runtime on this CPU, in this process or in one that may die.

A trial holds the operands of one problem. Each configuration is checked against NumPy the first time, then timed in
turns with the default: default, configuration, default, configuration, ... and its runtime is the default's times the
median ratio, so that a clock that drifts does not decide; the few that lie close together are timed again in turns.
In a process of its own, a configuration that crashes or hangs costs that process and gets a verdict; the tuner goes on.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tilewise.profile.timing.interleave import time_interleaved
from tilewise.profile.timing.workers import Worker, WorkerLostError, wait_any
from tilewise.store.problem import Config, Problem
from tilewise.tune.families.cpu.family import Array, get_family, is_right
from tilewise.tune.measure.cpu.clock import one_run, running_on

_UNIT_NS = 4.0e5  # short turns: what disturbs one contender then disturbs the other as well
_ROUNDS = 17
_MOST_CALLS = 200
_SLOW_NS = 2.0e7  # from here on, fewer rounds
START_SECONDS = 60.0


@dataclass(frozen=True)
class Timed:
    """What a trial found: a runtime beside the default's in the same seconds, or why there is none."""

    runtime_ns: float | None
    default_ns: float | None
    status: str = "ok"
    reason: str = ""


class Trial(Protocol):
    """Measures configurations of one problem."""

    def measure(self, config: Config) -> Timed: ...

    def remeasure(self, configs: Sequence[Config]) -> Sequence[float | None]:
        """Nanoseconds of configurations that were measured before and lie close together, in turns where that can be
        done, on the scale they were measured on."""


class CpuTrial:
    """In this process."""

    def __init__(self, problem: Problem, default: Config, seed: int = 0) -> None:
        self.family, self.problem, self.default = get_family(problem.family), problem, default
        rng = np.random.default_rng(seed)
        self._operands = self.family.operands(problem, rng)
        self._expected = self.family.expected(problem, self._operands)
        self._default_run = self.family.runner(problem, default, self._operands)
        self._default_ns: float | None = None  # in the first trial, which all are brought to: clocks drift

    def measure(self, config: Config) -> Timed:
        with running_on(self.problem.threads):
            try:
                run = self.family.runner(self.problem, config, self._operands)
                result = run()
            except Exception as error:  # whatever a kernel raises is this configuration's verdict
                return Timed(None, None, "failed", f"{type(error).__name__}: {error}"[:300])
            if not is_right(result, self._expected):
                return Timed(None, None, "wrong", "the result differs from NumPy's")
            return self._time(run)

    def _time(self, run: Callable[[], Array]) -> Timed:
        self._default_run()
        rough_ns = min(one_run(run), one_run(run))
        calls = int(min(max(_UNIT_NS / rough_ns, 1), _MOST_CALLS))
        rounds = _ROUNDS if rough_ns * calls < _SLOW_NS else 3
        defaults, own = time_interleaved([self._default_run, run], rounds, calls=calls, warmup=0)
        ratio = statistics.median(a / b for a, b in zip(own, defaults, strict=True))
        steady = min(own) / min(defaults)  # both at their fastest: what neither was disturbed in
        self._default_ns = self._default_ns or 1e9 * min(defaults)
        return Timed(self._default_ns * min(ratio, 1.03 * steady), self._default_ns)

    def remeasure(self, configs: Sequence[Config]) -> Sequence[float | None]:
        """Each round goes over all of them and the default; the median of the faster half counts."""
        assert self._default_ns is not None
        with running_on(self.problem.threads):
            runs = [self._default_run, *(self.family.runner(self.problem, c, self._operands) for c in configs)]
            rounds = 5 if max(map(one_run, runs)) > _SLOW_NS else 2 * _ROUNDS
            calls = [int(min(max(_UNIT_NS / one_run(run), 1), _MOST_CALLS)) for run in runs]
            turns = time_interleaved(runs, rounds, calls=calls, warmup=0)
        taken = [statistics.median(sorted(times)[: len(times) // 2 + 1]) for times in turns]
        return [self._default_ns * seconds / taken[0] for seconds in taken[1:]]


class WorkerTrial:
    """In a process that may die: a configuration has `limit_s` seconds."""

    def __init__(self, worker: Worker, problem: Problem, default: Config, limit_s: float, seed: int = 0) -> None:
        self._worker, self._task, self.limit_s = worker, (problem.key, default.key, seed), limit_s
        self._known = False

    def measure(self, config: Config) -> Timed:
        seconds = self.limit_s + (0.0 if self._known else START_SECONDS)
        self._worker.submit((*self._task, config.key), seconds)
        while True:
            for worker, message in wait_any([self._worker], 0.5):
                worker.finish()
                if isinstance(message, WorkerLostError):
                    self._known = False
                    return Timed(None, None, "failed", f"this configuration ended its process: {message}")
                self._known = True
                return Timed(*message)

    def remeasure(self, configs: Sequence[Config]) -> Sequence[float | None]:
        return [self.measure(config).runtime_ns for config in configs]


def serve(connection: Any, plugins: tuple[str, ...] = ()) -> None:
    """The worker's life: (problem, default, seed, configuration) in, a Timed's values out."""
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
            timed = trials[key].measure(Config.parse(config))
        except Exception as error:  # said to the parent, who goes on
            timed = Timed(None, None, "failed", f"{type(error).__name__}: {error}"[:300])
        connection.send((timed.runtime_ns, timed.default_ns, timed.status, timed.reason))


@contextlib.contextmanager
def cpu_worker(plugins: tuple[str, ...] = ()) -> Iterator[Worker]:
    """A process to measure in, ended with the block."""
    worker = Worker(serve, plugins)
    try:
        yield worker
    finally:
        worker.stop()
