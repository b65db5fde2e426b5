"""Read a kernel from an npz file in TpuGraphs' format.

A file without a graph gets a graph of one unknown instruction. A file without normalizers is normalized by the kernel's
median runtime. Everything else is checked by `kernel.make_kernel`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tilewise.costmodel.data.kernel import Kernel, make_kernel
from tilewise.costmodel.data.npz import Array, read_npz
from tilewise.costmodel.data.schema import NODE_FEATURES
from tilewise.errors import FileFormatError

KEYS = (
    "node_feat",
    "node_opcode",
    "edge_index",
    "config_feat",
    "config_runtime",
    "config_runtime_normalizers",
)


_GRAPH_KEYS, _REQUIRED_KEYS, _NORMALIZERS = KEYS[:3], KEYS[3:5], KEYS[5]


# Limits for untrusted files, far above TpuGraphs' largest kernel.
_MAX_RUNTIME_NS = 1e18


def read_kernel(path: Path, width: int) -> Kernel:
    """Read and check one npz file whose configurations have `width` features; keys beyond the six are ignored."""
    # The graph and the normalizers may be absent; a part of a graph may not.
    arrays = read_npz(path, _REQUIRED_KEYS, (*_GRAPH_KEYS, _NORMALIZERS))
    if not arrays.keys() & set(_GRAPH_KEYS):
        unknown = np.zeros((1, len(NODE_FEATURES)), np.float32), np.zeros(1, np.uint8), np.zeros((0, 2), np.int32)
        arrays |= dict(zip(_GRAPH_KEYS, unknown, strict=True))
    if missing_keys := [key for key in _GRAPH_KEYS if key not in arrays]:
        raise FileFormatError(f"{path} lacks {', '.join(missing_keys)}; a graph needs {', '.join(_GRAPH_KEYS)}.")
    arrays["config_runtime"] = _whole_nanoseconds(arrays["config_runtime"], path)
    if _NORMALIZERS not in arrays:
        runtime = arrays["config_runtime"]
        # The upper median is one of the measured runtimes; the slice is empty for an empty array.
        median = np.sort(runtime.reshape(-1))[runtime.size // 2 : runtime.size // 2 + 1]
        arrays[_NORMALIZERS] = np.broadcast_to(median, runtime.shape) if median.size else runtime
    return make_kernel(path.stem, width=width, where=str(path), **{key: arrays[key] for key in KEYS})


def _whole_nanoseconds(runtime: Array, path: Path) -> Array:
    """Round float runtimes to integers; a positive runtime below 1 ns becomes 1 because 0 means unlabelled."""
    if runtime.dtype.kind != "f":
        return runtime
    if not np.isfinite(runtime).all() or (runtime < 0).any() or (runtime > _MAX_RUNTIME_NS).any():
        raise FileFormatError(
            f"{path}: config_runtime contains a value that is not a time in nanoseconds; omit failed configurations."
        )
    return np.where(runtime > 0, np.maximum(1, np.rint(runtime)), 0).astype(np.int64)
