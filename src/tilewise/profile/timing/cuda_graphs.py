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
    """Captures launches on one stream. Raises RuntimeError if a driver call fails."""

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
        """Wrap a driver function so that an error code becomes a RuntimeError."""
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
    """Capture `runs` with PyTorch. `torch.cuda.graph` would collect garbage and empty the allocator's cache as well."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        for run in runs:
            run()
    finally:
        graph.capture_end()
    replay: Run = graph.replay
    return replay
