"""CUDA graphs through the driver API: one call starts many launches, with no other GPU work between two timing events.

PyTorch's CUDAGraph updates its random number state on the GPU before each replay, which would be part of the measured
time; direct driver calls avoid that. PyTorch's graphs are the fallback if the driver library cannot be loaded.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
Run = Callable[[], None]


class DriverGraphs:
    """Captures kernel launches on one stream into CUDA graphs; RuntimeError if the driver fails."""

    def __init__(self, stream: int) -> None:
        """Load the driver library and declare the functions that are used."""
        library = ctypes.CDLL("libcuda.so.1")
        pointer, handle = ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
        self._begin = self._call(library, "cuStreamBeginCapture_v2", handle, ctypes.c_int)
        self._end = self._call(library, "cuStreamEndCapture", handle, pointer)
        self._instantiate = self._call(library, "cuGraphInstantiateWithFlags", pointer, handle, ctypes.c_ulonglong)
        self._launch = self._call(library, "cuGraphLaunch", handle, handle)
        self._destroy_graph = self._call(library, "cuGraphDestroy", handle)
        self._destroy_executable = self._call(library, "cuGraphExecDestroy", handle)
        self._stream = stream

    @staticmethod
    def _call(library: ctypes.CDLL, name: str, *types: Any) -> Callable[..., None]:
        """Return a driver function with these argument types that raises RuntimeError on an error code."""
        function = getattr(library, name)
        function.argtypes, function.restype = list(types), ctypes.c_int

        def checked(*arguments: Any) -> None:
            code = function(*arguments)
            if code:
                raise RuntimeError(f"{name} returned CUDA error {code}")

        return checked

    def capture(self, runs: Sequence[Run]) -> Run:
        """Capture `runs` into a graph and return a callable that launches it; deleting the callable frees the graph."""
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        self._begin(self._stream, _THREAD_LOCAL)
        try:
            for run in runs:
                run()
        finally:
            self._end(self._stream, ctypes.byref(graph))
        try:
            self._instantiate(ctypes.byref(executable), graph, 0)
        finally:
            self._destroy_graph(graph)
        graph_call = functools.partial(self._launch, executable, self._stream)
        weakref.finalize(graph_call, self._destroy_executable, executable).atexit = False
        return graph_call


def torch_graph(torch: Any, runs: Sequence[Run]) -> Run:
    """Capture `runs` into a CUDA graph with PyTorch and return a function that replays it.

    `torch.cuda.graph` would collect garbage and empty the allocator's cache as well.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        for run in runs:
            run()
    finally:
        graph.capture_end()
    replay: Run = graph.replay
    return replay


# --- clocks and temperature (NVML) ---


# Name of a reading, NVML's function, its selector (clock 1: SM, clock 2: memory, sensor 0: GPU), and the unit.
_READINGS = (
    ("sm_mhz", "nvmlDeviceGetClockInfo", (1,), 1.0),
    ("memory_mhz", "nvmlDeviceGetClockInfo", (2,), 1.0),
    ("celsius", "nvmlDeviceGetTemperature", (0,), 1.0),
    ("watts", "nvmlDeviceGetPowerUsage", (), 1e-3),
)
# Throttle reasons that do not mean a problem: "GPU idle" (1) and "application clocks setting" (2).
_HARMLESS = 0x1 | 0x2


class GpuWatch:
    """Reads the state of the first GPU (clocks, temperature, power) by NVML."""

    def __init__(self) -> None:
        """Load NVML; without it, all readings are empty."""
        self._library: ctypes.CDLL | None = None
        self._device = ctypes.c_void_p()
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
            ready = library.nvmlInit_v2() == 0
            if ready and library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._device)) == 0:
                self._library = library
        except (OSError, AttributeError):
            self._library = None

    def driver(self) -> str:
        """Return the driver's version, or "unknown"."""
        text = ctypes.create_string_buffer(96)
        if self._library is None or self._library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(96)) != 0:
            return "unknown"
        return text.value.decode()

    def name(self) -> str:
        """Return the GPU's product name, without initializing CUDA; "" if it is not available."""
        text = ctypes.create_string_buffer(96)
        return text.value.decode(errors="replace") if self._get("nvmlDeviceGetName", text, ctypes.c_uint(96)) else ""

    def capability(self) -> int | None:
        """Return the compute capability as a number such as 90, without initializing CUDA; None if unknown."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        success = self._get("nvmlDeviceGetCudaComputeCapability", ctypes.byref(major), ctypes.byref(minor))
        return major.value * 10 + minor.value if success else None

    def read(self) -> dict[str, float]:
        """Read sm_mhz, memory_mhz, celsius, watts and throttled (1 if the clock is reduced for any harmful reason)."""
        state: dict[str, float] = {}
        value, reasons = ctypes.c_uint(), ctypes.c_ulonglong()
        for name, getter, selector, scale in _READINGS:
            if self._get(getter, *selector, ctypes.byref(value)):
                state[name] = value.value * scale
        if self._get("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.byref(reasons)):
            state["throttled"] = float(bool(reasons.value & ~_HARMLESS))
        return state

    def _get(self, getter: str, *arguments: Any) -> bool:
        """Call an NVML function about the GPU; False if it is missing or fails."""
        function = getattr(self._library, getter, None)
        return function is not None and function(self._device, *arguments) == 0
