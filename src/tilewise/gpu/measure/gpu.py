"""Where kernels run: a CUDA GPU, or Triton's interpreter so that the whole collector can be tested without one.

A device loads binaries, launches them and times batches of launches. On the GPU a timed unit is a CUDA graph of many
launches between two events: the host's overhead per launch stays out, and one unit lasts long enough for the events'
half microsecond not to matter.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tilewise.errors import UnavailableError
from tilewise.gpu.families.family import LIBRARY_CALL, Binary, Launch
from tilewise.gpu.measure.compiling import compile_binary, find_kernel
from tilewise.profile.timing.cuda_graphs import DriverGraphs, Run, torch_graph
from tilewise.profile.timing.nvml import GpuWatch
from tilewise.tune.measure.sampling import Clock

HOPPER = 90
COLLECTIONS = {HOPPER: "h200"}  # whose model fits, by compute capability
NEAREST = "h200"  # whose model serves a GPU that was never measured: an A100's products it ranks nearly as well
# The most shared memory a block may ask for, by compute capability; what the device itself says comes first.
_SHARED_BYTES = {70: 98_304, 75: 65_536, 80: 166_912, 86: 101_376, 87: 166_912, 89: 101_376, 90: 232_448,
                 100: 232_448, 103: 232_448, 120: 101_376}  # fmt: skip


def usual_shared_bytes(capability: int) -> int:
    """What GPUs of a compute capability have; for an unknown one, the least of all."""
    return _SHARED_BYTES.get(capability, min(_SHARED_BYTES.values()))


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise UnavailableError(
            "Triton kernels are measured with PyTorch, which is not installed: pip install torch triton."
        ) from None


def check_gpu() -> Any:
    """PyTorch, or one sentence where it sees no GPU."""
    torch = _torch()
    if not torch.cuda.is_available():
        raise UnavailableError("PyTorch sees no CUDA GPU here, and Triton kernels are measured on one.")
    return torch


class CudaDevice(Clock):
    """One NVIDIA GPU through PyTorch. Everything goes to one side stream, since the default one cannot be captured."""

    torch_device = "cuda"
    warm_up_seconds = 0.02

    def __init__(self) -> None:
        torch = check_gpu()
        self.torch = torch
        torch.set_float32_matmul_precision("highest")  # the reference must not use tf32
        properties = torch.cuda.get_device_properties(0)
        self.capability = properties.major * 10 + properties.minor
        self.l2_bytes = int(getattr(properties, "L2_cache_size", 0) or 50 << 20)
        most = getattr(properties, "shared_memory_per_block_optin", 0)
        self.shared_bytes = int(most or usual_shared_bytes(self.capability))
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
        # How units are made, best first; a way that fails is struck off and said.
        self._ways: list[tuple[str, Callable[[Sequence[Run]], Run]]] = [
            ("the driver's graphs", self._with_driver),
            ("PyTorch's graphs", self._with_torch),
        ]

    def prepare(self, binary: Binary, launch: Launch) -> Run:
        """A callable that starts the kernel once; UnavailableError if it does not fit."""
        if launch.call is not None:
            return launch.call
        kernel = self._load(binary)
        constants = dict(binary.constants)
        # Addresses as integers: the launcher then skips asking the driver about every tensor.
        given = iter(value.data_ptr() if hasattr(value, "data_ptr") else value for value in launch.arguments)
        arguments = [constants[name] if name in constants else next(given) for name in kernel.src.fn.arg_names]
        run, function, packed = kernel.run, kernel.function, kernel.packed_metadata
        fixed = (*launch.grid, self._handle, function, packed, None, None, None, *arguments)
        return lambda: run(*fixed)

    def _load(self, binary: Binary) -> Any:
        kernel = self._loaded.get(binary.key)
        if kernel is None:
            from triton.runtime.errors import OutOfResources

            try:
                kernel = compile_binary(binary, self.capability)
                kernel._init_handles()
            except OutOfResources as error:
                raise UnavailableError(f"{error.name}: {error.required} needed, {error.limit} there") from None
            self._loaded[binary.key] = kernel
        return kernel

    def forget(self) -> None:
        """Let go of every loaded binary; they are compiled, or read from Triton's cache, when they are needed again."""
        self._loaded.clear()

    def registers(self, binary: Binary) -> tuple[int, int]:
        """Registers a thread and spilled ones, of a prepared binary."""
        if binary.kernel == LIBRARY_CALL:
            return 0, 0
        kernel = self._loaded[binary.key]
        return int(kernel.n_regs), int(kernel.n_spills)

    def unit(self, runs: Sequence[Run]) -> Run:
        """A callable that starts all `runs` back to back, with as little host time as possible."""
        while self._ways:
            try:
                return self._ways[0][1](runs)
            except (RuntimeError, OSError, AttributeError) as error:
                self.notes.append(f"timing without {self._ways[0][0]}: {type(error).__name__}: {error}")
                del self._ways[0]
                self.synchronize()
        return lambda: _launch_all(runs)

    def _with_driver(self, runs: Sequence[Run]) -> Run:
        if self._driver_graphs is None:
            self._driver_graphs = DriverGraphs(self._handle)
        return self._driver_graphs.capture(runs)

    def _with_torch(self, runs: Sequence[Run]) -> Run:
        return torch_graph(self.torch, runs)

    def each_unit(self, units: Iterable[Run]) -> Iterator[float]:
        """All are queued before the first reading is handed over: the GPU waits for nobody who deals with readings."""
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
            "timing": self._ways[0][0] if self._ways else "single launches",
        }

    def watch(self) -> dict[str, float]:
        return self._watch.read()


class InterpreterDevice(Clock):
    """Triton's interpreter on the CPU: right results, meaningless times. For tests and dry runs only."""

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
        return {"name": "Triton interpreter", "compute_capability": HOPPER, "timing": "interpreter"}


Gpu = CudaDevice | InterpreterDevice


def _launch_all(runs: Sequence[Run]) -> None:
    for run in runs:
        run()


def open_device(kind: str) -> Gpu:
    """The device called "cuda" or "interpreter"."""
    return InterpreterDevice() if kind == "interpreter" else CudaDevice()
