"""Measure Triton kernels on a device: a CUDA GPU, or Triton's interpreter, which tests the collector without a GPU.

A device loads binaries, launches them and times batches of launches. On the GPU a timed unit is a CUDA graph of many
launches between two events. The graph excludes the host's overhead per launch, and lasts long enough (`unit_ms`) for
the events' resolution of half a microsecond not to matter. Every configuration of a kernel is checked against PyTorch;
the correct ones are timed (`sampling`). Launches rotate through several sets of operands, so that operands are read
from memory and not from the L2 cache, as in a program.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewise.errors import UnavailableError
from tilewise.gpu.devices import H200, H200_CAPABILITY, shared_bytes_of
from tilewise.gpu.families.family import CUBLAS_CALL, Binary, Launch, Operands, get_family
from tilewise.gpu.measure.compiler import compile_binary, find_kernel, use_cache
from tilewise.profile.timing.gpu import DriverGraphs, GpuWatch, Run, torch_graph
from tilewise.store.problem import Config, Problem
from tilewise.store.reader import Verdict
from tilewise.store.store import BatchRow
from tilewise.tune.families.registry import Expected
from tilewise.tune.measure.sampling import Candidate, Clock, Report, TimingSettings, resume, time_all


def _torch() -> Any:
    """Import PyTorch; raise `UnavailableError` if it is not installed."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise UnavailableError(
            "Triton kernels are measured with PyTorch, which is not installed: pip install torch triton."
        ) from None


def check_gpu() -> Any:
    """Import PyTorch and check that it sees a GPU."""
    torch = _torch()
    if not torch.cuda.is_available():
        raise UnavailableError("PyTorch sees no CUDA GPU here, and Triton kernels are measured on one.")
    return torch


class CudaDevice(Clock):
    """One NVIDIA GPU through PyTorch. All work goes to a side stream, because the default stream cannot be captured."""

    torch_device = "cuda"
    warm_up_seconds = 0.02

    def __init__(self) -> None:
        """Open the first GPU and read its properties."""
        torch = check_gpu()
        self.torch = torch
        torch.set_float32_matmul_precision("highest")  # reference results must not use tf32
        properties = torch.cuda.get_device_properties(0)
        self.capability = properties.major * 10 + properties.minor
        self.l2_bytes = int(getattr(properties, "L2_cache_size", 0) or H200.l2_bytes or 0)
        reported = getattr(properties, "shared_memory_per_block_optin", 0)
        self.shared_bytes = int(reported or shared_bytes_of(self.capability))
        self.multiprocessors = int(properties.multi_processor_count)
        self.memory_bytes = int(properties.total_memory)
        self.name = str(properties.name)
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)
        self._handle = self.stream.cuda_stream
        self._loaded: dict[str, Any] = {}
        self._events: list[Any] = []
        self._watch = GpuWatch()
        self.notes: list[str] = []
        self._driver_graphs: DriverGraphs | None = None
        # Ways to capture a unit, the best first; one that fails is removed and noted.
        self._capture_methods: list[tuple[str, Callable[[Sequence[Run]], Run]]] = [
            ("the driver's graphs", self._capture_with_driver),
            ("PyTorch's graphs", functools.partial(torch_graph, torch)),
        ]

    def prepare(self, binary: Binary, launch: Launch) -> Run:
        """Load a binary and return a function that launches it once; UnavailableError if it does not fit."""
        if launch.call is not None:
            return launch.call
        kernel = self._load(binary)
        constants = dict(binary.constants)
        # Addresses are passed as integers, so that the launcher does not query the driver for every tensor.
        values = iter(value.data_ptr() if hasattr(value, "data_ptr") else value for value in launch.arguments)
        arguments = [constants[name] if name in constants else next(values) for name in kernel.src.fn.arg_names]
        run, function, packed = kernel.run, kernel.function, kernel.packed_metadata
        fixed = (*launch.grid, self._handle, function, packed, None, None, None, *arguments)
        return lambda: run(*fixed)

    def _load(self, binary: Binary) -> Any:
        """Compile a binary, or read it from Triton's cache, and load it onto the GPU."""
        kernel = self._loaded.get(binary.key)
        if kernel is None:
            from triton.runtime.errors import OutOfResources

            try:
                kernel = compile_binary(binary, self.capability)
                kernel._init_handles()
            except OutOfResources as error:
                raise UnavailableError(f"{error.name}: {error.required} needed, {error.limit} available") from None
            self._loaded[binary.key] = kernel
        return kernel

    def forget(self) -> None:
        """Unload all binaries; each is compiled, or read from Triton's cache, when it is used again."""
        self._loaded.clear()

    def registers(self, binary: Binary) -> tuple[int, int]:
        """Return the registers and the spilled bytes per thread of a prepared binary."""
        if binary.kernel == CUBLAS_CALL:
            return 0, 0
        kernel = self._loaded[binary.key]
        return int(kernel.n_regs), int(kernel.n_spills)

    def unit(self, runs: Sequence[Run]) -> Run:
        """Return a function that launches all `runs` back to back, as one CUDA graph if possible."""
        while self._capture_methods:
            try:
                return self._capture_methods[0][1](runs)
            except (RuntimeError, OSError, AttributeError) as error:
                self.notes.append(f"timing without {self._capture_methods[0][0]}: {type(error).__name__}: {error}")
                del self._capture_methods[0]
                self.synchronize()
        return lambda: _launch_all(runs)

    def _capture_with_driver(self, runs: Sequence[Run]) -> Run:
        """Capture the runs into a CUDA graph through the driver; return a function that replays it."""
        if self._driver_graphs is None:
            self._driver_graphs = DriverGraphs(self._handle)
        return self._driver_graphs.capture(runs)

    def each_unit(self, units: Iterable[Run]) -> Iterator[float]:
        """Time units one after the other and yield the nanoseconds of each.

        All units are queued before the first time is returned, so that the GPU never waits for the caller.
        """
        units = list(units)
        while len(self._events) < 2 * len(units):
            self._events.append(self.torch.cuda.Event(enable_timing=True))
        starts, ends = self._events[: len(units)], self._events[len(units) : 2 * len(units)]
        for start, unit, end in zip(starts, units, ends, strict=True):
            start.record(self.stream)
            unit()
            end.record(self.stream)
        for start, end in zip(starts, ends, strict=True):
            end.synchronize()
            yield start.elapsed_time(end) * 1e6

    def synchronize(self) -> None:
        self.stream.synchronize()

    def describe(self) -> dict[str, Any]:
        """Return the facts about this GPU and its software that a measurement store records."""
        import triton

        return {
            "name": self.name,
            "compute_capability": self.capability,
            "multiprocessors": self.multiprocessors,
            "memory_bytes": self.memory_bytes,
            "l2_bytes": self.l2_bytes,
            "shared_bytes": self.shared_bytes,
            "driver": self._watch.driver(),
            "cuda": str(self.torch.version.cuda),
            "torch": str(self.torch.__version__),
            "triton": str(triton.__version__),
            "timing": self._capture_methods[0][0] if self._capture_methods else "single launches",
        }

    def watch(self) -> dict[str, float]:
        return self._watch.read()


class InterpreterDevice(Clock):
    """Triton's interpreter on the CPU: correct results, meaningless times. For tests and dry runs only."""

    torch_device = "cpu"
    l2_bytes = 0

    def __init__(self) -> None:
        """Switch Triton to its interpreter and import PyTorch, on one thread."""
        os.environ["TRITON_INTERPRET"] = "1"
        torch = _torch()
        self.torch = torch
        self.notes: list[str] = []
        torch.set_num_threads(1)

    def prepare(self, binary: Binary, launch: Launch) -> Run:
        """Return a function that runs the kernel once in Triton's interpreter."""
        if launch.call is not None:
            return launch.call
        kernel = find_kernel(binary.kernel)
        constants = dict(binary.constants)
        return lambda: kernel[launch.grid](*launch.arguments, **constants)

    def unit(self, runs: Sequence[Run]) -> Run:
        return lambda: _launch_all(runs)

    def registers(self, binary: Binary) -> tuple[int, int]:
        return 0, 0

    def synchronize(self) -> None:
        return

    def describe(self) -> dict[str, Any]:
        return {"name": "Triton interpreter", "compute_capability": H200_CAPABILITY, "timing": "interpreter"}


Gpu = CudaDevice | InterpreterDevice


def _launch_all(runs: Sequence[Run]) -> None:
    for run in runs:
        run()


def open_device(kind: str) -> Gpu:
    """Open the device "cuda" or "interpreter"."""
    return InterpreterDevice() if kind == "interpreter" else CudaDevice()


@dataclass(frozen=True)
class Job:
    """A kernel to measure.

    With `careful` the GPU process synchronises after each configuration and reports which one is next, so that a
    configuration that ends the process can be identified.
    """

    problem: Problem
    configs: tuple[Config, ...]  # the default first
    seed: int
    settings: TimingSettings = field(default_factory=TimingSettings)
    careful: bool = False
    earlier: tuple[BatchRow, ...] = ()  # batches that the store already has
    finals: bool = False  # time the finalists only


def measure(device: Gpu, job: Job, report: Report) -> None:
    """Check and time a job's configurations; each verdict and timing is passed to `report` immediately."""
    sets = operand_sets(device, job)
    candidates = _check_all(device, job, sets, report)
    if not candidates or candidates[0].config != job.configs[0]:
        return  # runtimes are normalised by the default's; the verdicts say why it failed
    _make_units(device, job, candidates)
    while device.notes:
        report("note", device.notes.pop(0))
    resume(device, job.settings, candidates, job.earlier, report)
    time_all(device, job.settings, candidates, job.seed, report, finals_only=job.finals)


def operand_sets(device: Gpu, job: Job) -> list[Operands]:
    """Allocate up to `max_sets` sets of operands, enough for a set to have left the L2 cache when it is used again."""
    family = get_family(job.problem.family)
    generator = device.torch.Generator(device=device.torch_device).manual_seed(job.seed)
    footprint = max(family.bytes_moved(job.problem), 1)
    count = min(max(1, math.ceil(2.5 * device.l2_bytes / footprint)), job.settings.max_sets)
    return [family.operands(job.problem, device.torch, device.torch_device, generator) for _ in range(count)]


def _check_all(device: Gpu, job: Job, sets: Sequence[Operands], report: Report) -> list[Candidate]:
    """Run every configuration into an output of NaN and report its verdict; return the correct, fast enough ones."""
    family, torch = get_family(job.problem.family), device.torch
    expected = family.expected(job.problem, torch, sets[0])
    # Comparisons stay on the GPU until the end, so that it never waits for the host.
    right = torch.zeros(len(job.configs), dtype=torch.bool, device=device.torch_device)
    verdicts: dict[Config, Verdict] = {}
    candidates: list[Candidate] = []
    for index, config in enumerate(job.configs):
        if job.careful:
            report("next", config)
        binary = family.binary(job.problem, config)
        try:
            runs = [device.prepare(binary, family.launch(job.problem, config, operands)) for operands in sets]
        except UnavailableError as error:
            verdicts[config] = Verdict(config, "misfit", str(error))
            continue
        registers, spills = device.registers(binary)
        verdicts[config] = Verdict(config, "ok", details={"registers": registers, "spills": spills})
        right[index] = is_right(sets[0], expected, runs[0], is_cublas=binary.kernel == CUBLAS_CALL)
        if job.careful:
            device.synchronize()
        candidates.append(Candidate(index, config, runs))
    device.synchronize()
    right_list = right.tolist()
    correct = [candidate for candidate in candidates if right_list[candidate.index]]
    wrong = [candidate.config for candidate in candidates if not right_list[candidate.index]]
    verdicts |= {config: Verdict(config, "wrong", "the result differs from PyTorch's") for config in wrong}
    fast_enough = list(_drop_slow(device, job, correct, verdicts))
    report("verdicts", list(verdicts.values()))
    return fast_enough


def is_right(operands: Operands, expected: Expected, run: Run, *, is_cublas: bool = False) -> Any:
    """Run once; return, as a tensor, whether the output is correct and nothing was written outside of it."""
    # NaN shows elements that the kernel does not write; behind the output it must stay.
    operands.guarded.fill_(math.nan)
    run()
    out, guard = operands.out, operands.guarded[operands.out.numel() :]
    # cuBLAS may round intermediate sums, so its result only has to be finite.
    close = out.isfinite() if is_cublas else (out.float() - expected.value).abs() <= expected.bound
    return close.all() & guard.isnan().all()


def _drop_slow(
    device: Gpu, job: Job, candidates: list[Candidate], verdicts: dict[Config, Verdict]
) -> Iterator[Candidate]:
    """Estimate each candidate's time from one launch.

    Yield those below `slowest_ms`, mark the others as slow in `verdicts`.
    """
    for candidate, runtime_ns in zip(candidates, device.time_units([c.runs[0] for c in candidates]), strict=True):
        candidate.estimate_ns = max(runtime_ns, 500.0)
        is_default = candidate.config == job.configs[0]
        if candidate.estimate_ns > job.settings.slowest_ms * 1e6 and not is_default:
            reason = f"one run took {candidate.estimate_ns / 1e6:.1f} ms"
            verdicts[candidate.config] = Verdict(candidate.config, "slow", reason)
            continue
        yield candidate


def _make_units(device: Gpu, job: Job, candidates: Sequence[Candidate]) -> None:
    """Set each candidate's timed unit: enough launches to last about `unit_ms`, as a CUDA graph."""
    for candidate in candidates:
        sets = len(candidate.runs)
        launches = round(job.settings.unit_ms * 1e6 / candidate.estimate_ns)
        launches = min(max(launches, 1), job.settings.max_launches)
        if launches > sets:
            launches = max(1, round(launches / sets)) * sets  # every set is used equally often
        candidate.launches = launches
        # If not all sets are used, neighbouring candidates start with different ones.
        offset = candidate.index if launches < sets else 0
        candidate.unit = device.unit([candidate.runs[(offset + i) % sets] for i in range(launches)])


def serve(connection: Any, kind: str, shared: dict[str, Any]) -> None:
    """Main loop of the GPU process: send a description of the device, then receive jobs and send results."""
    use_cache(shared["cache"])
    try:
        device = open_device(kind)
    except Exception as error:
        connection.send(("unavailable", str(error)))
        return
    for name in shared.get("plugins", ()):
        __import__(name)
    connection.send(("device", device.describe()))
    while True:
        job = connection.recv()
        start = time.perf_counter()
        try:
            # The collector stores the messages while the GPU continues.
            measure(device, job, lambda *message: connection.send(message))
        except Exception as error:  # a failure concerns this kernel alone; the collector records it
            connection.send(("failed", f"{type(error).__name__}: {error}"[:500], traceback.format_exc()[-3000:]))
            return  # a CUDA error may have destroyed the context, so the collector starts a new process
        connection.send(("done", time.perf_counter() - start))
