"""This GPU as the tuner sees it: the Triton families, their configurations, trials that compile what they measure."""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tilewise import __version__
from tilewise._system import real_cores
from tilewise.errors import UnavailableError
from tilewise.gpu.families.family import Binary, Operands, TritonFamily, get_family
from tilewise.gpu.measure.compiling import Compiled, serve, use_cache
from tilewise.gpu.measure.gpu import COLLECTIONS, NEAREST, CudaDevice, open_device
from tilewise.gpu.measure.kernel import Job, operand_sets
from tilewise.profile.timing.workers import Worker, WorkerLostError, wait_any
from tilewise.store.problem import Config, Problem
from tilewise.tune.measure.device import Device
from tilewise.tune.measure.sampling import Run
from tilewise.tune.measure.trial import Timed, Trial

_UNIT_NS = 4.0e5
_MOST_LAUNCHES = 48
_ROUNDS, _TURNS, _WARM_UP = 9, 21, 3  # of one measurement, of a run-off; those of them that only warm up come before
_COMPILE_SECONDS = 120.0


class TritonDevice(Device):
    """Problems of the Triton families on the first GPU; a sweep compiles in so many `processes`."""

    margin = 0.0

    def __init__(self, device: Any = None, processes: int = 0) -> None:
        self.device: Any = device or open_device("cuda")
        details = self.device.describe()
        capability = int(details.get("compute_capability", 0))
        super().__init__("triton", details, COLLECTIONS.get(capability, NEAREST))
        self.own_model = capability in COLLECTIONS
        self.version = f"{__version__}, triton {details.get('triton', 'unknown')}"
        self.shared_bytes = int(details.get("shared_bytes", 1 << 30))
        self.processes = processes or max(1, (real_cores() - 2) // 2)
        self._sweep_cache = ""
        self._compiled: dict[str, Compiled] = {}  # in sweeps
        self._known: dict[tuple[Any, ...], tuple[Sequence[Config], Sequence[Config]]] = {}  # those that fit, by list

    def configs(self, problem: Problem) -> Sequence[Config]:
        family = get_family(problem.family)
        every = family.configs(problem)
        fits_by = getattr(family, "fits_by", None)
        if fits_by is None or not isinstance(every, tuple):
            return self._fitting(family, problem, every)
        key = (id(every), *(problem[name] for name in fits_by))
        if key not in self._known:
            self._known[key] = every, tuple(self._fitting(family, problem, every))
        return self._known[key][1]

    def _fitting(self, family: TritonFamily, problem: Problem, every: Sequence[Config]) -> list[Config]:
        return [config for config in every if family.misfit(problem, config, self.shared_bytes) is None]

    @contextlib.contextmanager
    def trial(self, problem: Problem, default: Config) -> Iterator[Trial]:
        yield TritonTrial(self.device, problem)

    def sweep(self, problem: Problem, configs: Sequence[Config]) -> tuple[dict[Config, float], float]:
        """Compiled in parallel, told as if one after the other, which is what autotuners do; a binary that two problems
        share is counted for both."""
        self._sweep_cache = self._sweep_cache or tempfile.mkdtemp(prefix="tilewise-sweep-")
        use_cache(self._sweep_cache)
        family = get_family(problem.family)
        binaries = {family.binary(problem, config).key: family.binary(problem, config) for config in configs}
        self._compile([binary for key, binary in binaries.items() if key not in self._compiled])
        trial, runtime = TritonTrial(self.device, problem), {}
        start = time.perf_counter()
        for config in configs:
            if self._compiled[family.binary(problem, config).key].failure is None:
                timed = trial.measure(config)
                if timed.runtime_ns is not None:
                    runtime[config] = timed.runtime_ns
        measuring = time.perf_counter() - start
        return runtime, measuring + sum(self._compiled[key].seconds for key in binaries)

    def _compile(self, binaries: Sequence[Binary]) -> None:
        queue = list(reversed(binaries))
        workers = [Worker(serve, self.device.capability, self._sweep_cache) for _ in range(self.processes)]
        try:
            while queue or any(worker.busy for worker in workers):
                for worker in workers:
                    if not worker.busy and queue:
                        worker.submit(queue.pop(), _COMPILE_SECONDS)
                for worker, message in wait_any(workers, 0.25):
                    key = worker.task.key
                    worker.finish()
                    lost = isinstance(message, WorkerLostError)
                    self._compiled[key] = Compiled(0, 0.0, f"does not compile: {message}") if lost else message
        finally:
            for worker in workers:
                worker.stop()

    def forget(self) -> None:
        """As if nothing had been compiled yet: an empty cache folder, and no kernel loaded."""
        use_cache(tempfile.mkdtemp(prefix="tilewise-triton-"))
        if isinstance(self.device, CudaDevice):
            self.device.forget()


class TritonTrial:
    """Compiles, checks against PyTorch and times one configuration after the other.

    Seconds of compiling lie between two measurements, and the clock differs after each. So every configuration is timed
    in turns with the one that was measured first, and its runtime is that one's times the ratio.
    """

    def __init__(self, device: Any, problem: Problem, seed: int = 0) -> None:
        self.device, self.problem, self.family = device, problem, get_family(problem.family)
        self._sets: list[Operands] = operand_sets(device, Job(problem, (), seed))
        self._expected = self.family.expected(problem, device.torch, self._sets[0])
        self._units: dict[Config, tuple[Run, int]] = {}
        self._first: tuple[Config, float] | None = None

    def measure(self, config: Config) -> Timed:
        try:
            runs = self._prepare(config)
            if not self._is_right(runs[0]):
                return Timed(None, None, "wrong", "the result differs from PyTorch's")
        except UnavailableError as error:
            return Timed(None, None, "misfit", str(error))
        except Exception as error:  # Triton raises many kinds; each is this configuration's verdict
            return Timed(None, None, "failed", f"{type(error).__name__}: {error}"[:300])
        self._units[config] = self.unit(runs)
        if self._first is None:
            self._first = config, self.in_turns([config], _ROUNDS)[0]
            return Timed(self._first[1], None)
        first, first_ns = self._first
        return Timed(first_ns * self._ratio(config, first), None)

    def _ratio(self, config: Config, other: Config) -> float:
        """How much longer it takes than another, by the median of what neighbouring turns say."""
        own, others = zip(*self._rounds([config, other], _ROUNDS), strict=True)
        return float(statistics.median(a / b for a, b in zip(own, others, strict=True)))

    def in_turns(self, configs: Sequence[Config], turns: int = _TURNS) -> list[float]:
        """Nanoseconds of configurations that were measured before: medians over rounds without a pause."""
        return [statistics.median(times) for times in zip(*self._rounds(configs, turns), strict=True)]

    def remeasure(self, configs: Sequence[Config]) -> Sequence[float | None]:
        """The same, as if the clock were what it was when the first configuration was measured."""
        assert self._first is not None
        first, first_ns = self._first
        taken = dict(zip([first, *configs], self.in_turns([first, *configs]), strict=True))
        return [first_ns * taken[config] / taken[first] for config in configs]

    def _rounds(self, configs: Sequence[Config], count: int) -> list[list[float]]:
        """Nanoseconds of each configuration in each round, without a pause, after a few that only warm up."""
        units, launches = zip(*(self._units[config] for config in configs), strict=True)
        taken = iter(self.device.time_units(list(units) * (_WARM_UP + count)))
        rounds = [[next(taken) / each for each in launches] for _ in range(_WARM_UP + count)]
        return rounds[_WARM_UP:]

    def _prepare(self, config: Config) -> list[Run]:
        binary = self.family.binary(self.problem, config)
        return [self.device.prepare(binary, self.family.launch(self.problem, config, o)) for o in self._sets]

    def _is_right(self, run: Run) -> bool:
        first = self._sets[0]
        first.guarded.fill_(math.nan)
        run()
        out, guard = first.out, first.guarded[first.out.numel() :]
        close = ((out.float() - self._expected.value).abs() <= self._expected.bound).all()
        return bool(close & guard.isnan().all())

    def unit(self, runs: Sequence[Run]) -> tuple[Run, int]:
        """One timed unit that goes through the operand sets in turn, and its launches."""
        rough = max(min(self.device.time_units([runs[0], runs[0]])), 500.0)
        launches = int(min(max(_UNIT_NS / rough, len(runs) if rough < _UNIT_NS else 1), _MOST_LAUNCHES))
        return self.device.unit([runs[i % len(runs)] for i in range(launches)]), launches
