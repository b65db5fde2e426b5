"""Devices that run Triton kernels: a CUDA GPU, or Triton's interpreter, which tests the collector without a GPU.

A device loads binaries, launches them and times batches of launches. On the GPU a timed unit is a CUDA graph of many
launches between two events. The graph excludes the host's overhead per launch, and lasts long enough for the events'
resolution of half a microsecond not to matter.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tilewise.errors import UnavailableError
from tilewise.gpu.devices import H200, H200_CAPABILITY, shared_bytes_of
from tilewise.gpu.families.family import CUBLAS_CALL, Binary, Launch
from tilewise.gpu.measure.compiler import compile_binary, find_kernel
from tilewise.profile.timing.gpu import DriverGraphs, GpuWatch, Run, torch_graph
from tilewise.tune.measure.sampling import Clock


def _torch() -> Any:
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
        """Return a callable that launches the kernel once; raise UnavailableError if it does not fit."""
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
        """Drop all loaded binaries; they are compiled or read from Triton's cache when they are used again."""
        self._loaded.clear()

    def registers(self, binary: Binary) -> tuple[int, int]:
        """Return the registers and the spilled bytes per thread of a prepared binary."""
        if binary.kernel == CUBLAS_CALL:
            return 0, 0
        kernel = self._loaded[binary.key]
        return int(kernel.n_regs), int(kernel.n_spills)

    def unit(self, runs: Sequence[Run]) -> Run:
        """Return a callable that launches all `runs` back to back, with as little host time as possible."""
        while self._capture_methods:
            try:
                return self._capture_methods[0][1](runs)
            except (RuntimeError, OSError, AttributeError) as error:
                self.notes.append(f"timing without {self._capture_methods[0][0]}: {type(error).__name__}: {error}")
                del self._capture_methods[0]
                self.synchronize()
        return lambda: _launch_all(runs)

    def _capture_with_driver(self, runs: Sequence[Run]) -> Run:
        if self._driver_graphs is None:
            self._driver_graphs = DriverGraphs(self._handle)
        return self._driver_graphs.capture(runs)

    def each_unit(self, units: Iterable[Run]) -> Iterator[float]:
        """Time units one after the other.

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
        os.environ["TRITON_INTERPRET"] = "1"
        torch = _torch()
        self.torch = torch
        self.notes: list[str] = []
        torch.set_num_threads(1)

    def prepare(self, binary: Binary, launch: Launch) -> Run:
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
