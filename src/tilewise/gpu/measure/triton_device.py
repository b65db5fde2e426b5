"""The tuner's device for Triton families: lists configurations, and compiles, checks and times them."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tilewise import __version__
from tilewise._system import real_cores
from tilewise.errors import UnavailableError
from tilewise.gpu.devices import NEAREST_COLLECTION, model_collection
from tilewise.gpu.families.family import Binary, Operands, TritonFamily, get_family
from tilewise.gpu.measure.compiler import CompileResult, serve, use_cache
from tilewise.gpu.measure.execution import CudaDevice, Job, is_right, open_device, operand_sets
from tilewise.profile.timing.workers import Worker, WorkerLostError, wait_any
from tilewise.store.problem import Config, Problem
from tilewise.tune.measure import Trial, TrialResult
from tilewise.tune.measure.device import TuningDevice
from tilewise.tune.measure.sampling import Run

_UNIT_NS = 4.0e5  # target length of one timed CUDA graph
_MAX_LAUNCHES = 48  # per graph
# Rounds of a first measurement, of a comparison of finalists, and of the warm-up before either.
_ROUNDS, _FINAL_ROUNDS, _WARM_UP_ROUNDS = 9, 21, 3
_COMPILE_SECONDS = 120.0  # time limit of one compilation


class TritonDevice(TuningDevice):
    """Problems of the Triton families on the first GPU; a sweep compiles in `processes` processes."""

    margin = 0.0

    def __init__(self, device: Any = None, processes: int = 0) -> None:
        """Open the GPU; `device` replaces it in tests."""
        self.device: Any = device or open_device("cuda")
        details = self.device.describe()
        capability = int(details.get("compute_capability", 0))
        collection = model_collection(capability)
        super().__init__("triton", details, collection or NEAREST_COLLECTION)
        self.own_model = collection is not None and collection in str(details["name"]).lower()
        self.version = f"{__version__}, triton {details.get('triton', 'unknown')}"
        self.shared_bytes = int(details.get("shared_bytes", 1 << 30))
        self.processes = processes or max(1, (real_cores() - 2) // 2)
        self._sweep_cache = ""
        self._compile_results: dict[str, CompileResult] = {}  # of sweeps, by the binary's key
        # (all configurations, those that fit), by the list's id and the fields of the problem that decide. Holding the
        # list keeps its id unique.
        self._fitting_cache: dict[tuple[Any, ...], tuple[Sequence[Config], Sequence[Config]]] = {}

    def configs(self, problem: Problem) -> Sequence[Config]:
        """List the configurations that fit, cached for families whose lists are shared between problems."""
        family = get_family(problem.family)
        configs = family.configs(problem)
        fits_by = getattr(family, "fits_by", None)
        if fits_by is None or not isinstance(configs, tuple):
            return self._fitting(family, problem, configs)
        key = (id(configs), *(problem[name] for name in fits_by))
        if key not in self._fitting_cache:
            self._fitting_cache[key] = configs, tuple(self._fitting(family, problem, configs))
        return self._fitting_cache[key][1]

    def _fitting(self, family: TritonFamily, problem: Problem, configs: Sequence[Config]) -> list[Config]:
        return [config for config in configs if family.misfit(problem, config, self.shared_bytes) is None]

    @contextlib.contextmanager
    def trial(self, problem: Problem, default: Config) -> Iterator[Trial]:
        yield TritonTrial(self.device, problem)

    def sweep(self, problem: Problem, configs: Sequence[Config]) -> tuple[dict[Config, float], float]:
        """Measure all configurations; return runtimes in ns, and the seconds that a sequential autotuner would take.

        Compilation runs in parallel, but its times are added up; a binary used by two problems counts for both.
        """
        self._sweep_cache = self._sweep_cache or tempfile.mkdtemp(prefix="tilewise-sweep-")
        use_cache(self._sweep_cache)
        family = get_family(problem.family)
        # Several configurations may share a binary; each is compiled once.
        binaries = {family.binary(problem, config).key: family.binary(problem, config) for config in configs}
        self._compile([binary for key, binary in binaries.items() if key not in self._compile_results])
        trial, runtime = TritonTrial(self.device, problem), {}
        start = time.perf_counter()
        for config in configs:
            if self._compile_results[family.binary(problem, config).key].failure is None:
                timing = trial.measure(config)
                if timing.runtime_ns is not None:
                    runtime[config] = timing.runtime_ns
        measuring = time.perf_counter() - start
        return runtime, measuring + sum(self._compile_results[key].seconds for key in binaries)

    def _compile(self, binaries: Sequence[Binary]) -> None:
        """Compile binaries in worker processes."""
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
                    if isinstance(message, WorkerLostError):
                        message = CompileResult(0, 0.0, f"does not compile: {message}")
                    self._compile_results[key] = message
        finally:
            for worker in workers:
                worker.stop()

    def forget(self) -> None:
        """Empty the compilation cache and unload all kernels, as in a new process."""
        use_cache(tempfile.mkdtemp(prefix="tilewise-triton-"))
        if isinstance(self.device, CudaDevice):
            self.device.forget()


class TritonTrial:
    """Compiles, checks against PyTorch and times one configuration after the other.

    Seconds of compiling pass between two measurements, and the GPU's clock differs after each. So every configuration
    is timed interleaved with the first one, and its runtime is the first one's runtime times the ratio.
    """

    def __init__(self, device: Any, problem: Problem, seed: int = 0) -> None:
        """Allocate operands of the problem, drawn with `seed`, on the device."""
        self.device, self.problem, self.family = device, problem, get_family(problem.family)
        self._sets: list[Operands] = operand_sets(device, Job(problem, (), seed))
        self._expected = self.family.expected(problem, device.torch, self._sets[0])
        self._units: dict[Config, tuple[Run, int]] = {}
        self._first: tuple[Config, float] | None = None

    def measure(self, config: Config) -> TrialResult:
        """Compile, check and time one configuration; failures are part of the result."""
        try:
            binary = self.family.binary(self.problem, config)
            launches = [self.family.launch(self.problem, config, operands) for operands in self._sets]
            runs = [self.device.prepare(binary, launch) for launch in launches]
            if not bool(is_right(self._sets[0], self._expected, runs[0])):
                return TrialResult(None, None, "wrong", "the result differs from PyTorch's")
        except UnavailableError as error:
            return TrialResult(None, None, "misfit", str(error))
        except Exception as error:  # Triton raises many types; a failure concerns this configuration alone
            return TrialResult(None, None, "failed", f"{type(error).__name__}: {error}"[:300])
        self._units[config] = self.unit(runs)
        if self._first is None:
            self._first = config, self.time_interleaved([config], _ROUNDS)[0]
            return TrialResult(self._first[1], None)
        # The ratio of two runtimes: the median over rounds, each with both configurations.
        first, first_ns = self._first
        ratio = statistics.median(ns / other_ns for ns, other_ns in self._rounds([config, first], _ROUNDS))
        return TrialResult(first_ns * ratio, None)

    def time_interleaved(self, configs: Sequence[Config], rounds: int = _FINAL_ROUNDS) -> list[float]:
        """Time configurations that were measured before, interleaved; return each one's median over `rounds` in ns."""
        return [statistics.median(times) for times in zip(*self._rounds(configs, rounds), strict=True)]

    def remeasure(self, configs: Sequence[Config]) -> Sequence[float | None]:
        """Time configurations again, interleaved, and correct for clock drift since the first time."""
        assert self._first is not None
        first, first_ns = self._first
        times = dict(zip([first, *configs], self.time_interleaved([first, *configs]), strict=True))
        return [first_ns * times[config] / times[first] for config in configs]

    def _rounds(self, configs: Sequence[Config], count: int) -> list[list[float]]:
        """Time each configuration once per round, after warm-up rounds: nanoseconds by configuration."""
        units, launches = zip(*(self._units[config] for config in configs), strict=True)
        times = iter(self.device.time_units(list(units) * (_WARM_UP_ROUNDS + count)))
        rounds = [[next(times) / unit_launches for unit_launches in launches] for _ in range(_WARM_UP_ROUNDS + count)]
        return rounds[_WARM_UP_ROUNDS:]

    def unit(self, runs: Sequence[Run]) -> tuple[Run, int]:
        """Capture a timed unit that cycles through the operand sets; return it and its number of launches."""
        estimate_ns = max(min(self.device.time_units([runs[0], runs[0]])), 500.0)
        launches = int(min(max(_UNIT_NS / estimate_ns, len(runs) if estimate_ns < _UNIT_NS else 1), _MAX_LAUNCHES))
        return self.device.unit([runs[i % len(runs)] for i in range(launches)]), launches
