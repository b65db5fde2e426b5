"""One kernel: a graph of tensor operations, its candidate tile configurations, and what they took to run.

`read_kernel` is the only way from a file to a `Kernel`, and it checks everything the rest of the package relies on:
keys, shapes, number types, edges inside the graph, finite features, runtimes that are all positive or, where the
answers are withheld, all zero. A file of somebody's own may do without a graph, which is then one instruction that
nothing is known of, and without normalizers, for which the kernel's median runtime stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.npz import Array, read_npz
from tilewise.costmodel.data.schema import N_OPCODES, NODE_FEATURES
from tilewise.errors import FileFormatError

KEYS = (
    "node_feat",
    "node_opcode",
    "edge_index",
    "config_feat",
    "config_runtime",
    "config_runtime_normalizers",
)
_GRAPH, _NEEDED, _NORMALIZERS = KEYS[:3], KEYS[3:5], KEYS[5]
_LONGEST_NS = 1e18
MAX_NODES = 1_000_000
MAX_EDGES = 16_000_000
MAX_CONFIGS = 10_000_000


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel of n nodes, m edges and c configurations; `runtime` is all zero where the answers are withheld."""

    name: str
    program: str
    node_feat: npt.NDArray[np.float32]  # (n, 140)
    node_opcode: npt.NDArray[np.uint8]  # (n,)
    edge_index: npt.NDArray[np.int32]  # (m, 2): row [u, v], u consumes the output of v
    config_feat: npt.NDArray[np.float32]  # (c, width)
    runtime: npt.NDArray[np.int64]  # (c,) nanoseconds
    normalizer: npt.NDArray[np.int64]  # (c,) nanoseconds of the default configuration in the same run

    @property
    def n_nodes(self) -> int:
        return len(self.node_opcode)

    @property
    def n_configs(self) -> int:
        return len(self.config_feat)

    @property
    def labelled(self) -> bool:
        return bool(self.n_configs) and bool(self.runtime[0] > 0)

    @property
    def target(self) -> npt.NDArray[np.float64]:
        """Runtime over the default configuration's runtime: below one is faster than the default."""
        if not self.labelled:
            raise FileFormatError(f"Kernel {self.name} has no runtimes: its split is unlabelled.")
        return np.asarray(self.runtime / self.normalizer, dtype=np.float64)


def program_of(name: str) -> str:
    """The program a kernel's name tells: what stands before the last underscore, or the whole name without one."""
    return name.rpartition("_")[0] or name


def read_kernel(path: Path, width: int) -> Kernel:
    """Read and check one npz file whose configurations have `width` features; keys beyond the six are ignored."""
    arrays = read_npz(path, _NEEDED, (*_GRAPH, _NORMALIZERS))
    if not arrays.keys() & set(_GRAPH):
        empty = np.zeros((1, len(NODE_FEATURES)), np.float32), np.zeros(1, np.uint8), np.zeros((0, 2), np.int32)
        arrays |= dict(zip(_GRAPH, empty, strict=True))
    if missing := [key for key in _GRAPH if key not in arrays]:
        raise FileFormatError(f"{path} lacks {', '.join(missing)}; a graph needs {', '.join(_GRAPH)}.")
    arrays["config_runtime"] = _nanoseconds(arrays["config_runtime"], path)
    if _NORMALIZERS not in arrays:
        runtime = arrays["config_runtime"]
        median = np.sort(runtime.reshape(-1))[runtime.size // 2 : runtime.size // 2 + 1]
        arrays[_NORMALIZERS] = np.broadcast_to(median, runtime.shape) if median.size else runtime
    return make_kernel(path.stem, width=width, where=str(path), **{key: arrays[key] for key in KEYS})


def _nanoseconds(runtime: Array, path: Path) -> Array:
    """Whole ones: what is smaller than one counts as one."""
    if runtime.dtype.kind != "f":
        return runtime
    if not np.isfinite(runtime).all() or (runtime < 0).any() or (runtime > _LONGEST_NS).any():
        raise FileFormatError(
            f"{path}: config_runtime holds a value that is no time in nanoseconds; leave out what failed."
        )
    return np.where(runtime > 0, np.maximum(1, np.rint(runtime)), 0).astype(np.int64)


def make_kernel(
    name: str,
    node_feat: Array,
    node_opcode: Array,
    edge_index: Array,
    config_feat: Array,
    config_runtime: Array,
    config_runtime_normalizers: Array,
    *,
    width: int | None = None,
    where: str = "kernel",
) -> Kernel:
    """A checked `Kernel` from arrays as they stand in the files."""
    width = config_feat.shape[-1] if width is None and config_feat.ndim == 2 else width
    parts = checked_graph(node_feat, node_opcode, edge_index, config_runtime, where)
    c = len(parts["runtime"])
    if config_feat.ndim == 2 and config_feat.shape[1] != width:
        raise FileFormatError(
            f"{where}: config_feat has {config_feat.shape[1]} columns where {width} are needed; the config_features of "
            "a schema.json beside train name others."
        )
    check_shape(config_feat, (c, width or 0), f"{where}: config_feat")
    check_shape(config_runtime_normalizers, (c,), f"{where}: config_runtime_normalizers")
    normalizer = integers(config_runtime_normalizers, 0, 1 << 62, f"{where}: config_runtime_normalizers")
    check_runtimes(parts["runtime"], normalizer, where)
    features = floats(config_feat, f"{where}: config_feat")
    return Kernel(name, program_of(name), config_feat=features, normalizer=normalizer.astype(np.int64), **parts)


def checked_graph(
    node_feat: Array, node_opcode: Array, edge_index: Array, config_runtime: Array, where: str
) -> dict[str, Any]:
    """What the files of tiles and of layouts have in common, checked, under the names of `Kernel`."""
    n, m, c = (len(np.atleast_1d(array)) for array in (node_opcode, edge_index, config_runtime))
    if not (1 <= n <= MAX_NODES and 1 <= c <= MAX_CONFIGS and m <= MAX_EDGES):
        raise FileFormatError(
            f"{where}: {n} nodes and {c} configurations; both must be at least one and within reason."
        )
    check_shape(node_feat, (n, len(NODE_FEATURES)), f"{where}: node_feat")
    check_shape(node_opcode, (n,), f"{where}: node_opcode")
    check_shape(edge_index, (m, 2), f"{where}: edge_index")
    check_shape(config_runtime, (c,), f"{where}: config_runtime")
    return {
        "node_feat": floats(node_feat, f"{where}: node_feat"),
        "node_opcode": integers(node_opcode, 0, N_OPCODES - 1, f"{where}: node_opcode").astype(np.uint8),
        "edge_index": integers(edge_index, 0, n - 1, f"{where}: edge_index").astype(np.int32),
        "runtime": integers(config_runtime, 0, 1 << 62, f"{where}: config_runtime").astype(np.int64),
    }


def check_shape(array: Array, shape: tuple[int, ...], where: str) -> None:
    if array.shape != shape:
        raise FileFormatError(f"{where} has shape {array.shape} where {shape} is needed.")


def floats(array: Array, where: str) -> npt.NDArray[np.float32]:
    if array.dtype.kind not in "fiu":
        raise FileFormatError(f"{where} has type {array.dtype}; numbers are needed.")
    with np.errstate(over="ignore"):
        values = array.astype(np.float32)
    if not np.isfinite(values).all():
        raise FileFormatError(f"{where} holds a value that is not a finite float32.")
    return values


def integers(array: Array, low: int, high: int, where: str) -> Array:
    if array.dtype.kind not in "iu":
        raise FileFormatError(f"{where} has type {array.dtype}; integers are needed.")
    if array.size and (int(array.min()) < low or int(array.max()) > high):
        found = int(array.min()) if int(array.min()) < low else int(array.max())
        raise FileFormatError(f"{where} holds {found}, outside {low} to {high}.")
    return array


def check_runtimes(runtime: Array, normalizer: Array, where: str) -> None:
    positive = runtime > 0
    if positive.any() and not positive.all():
        raise FileFormatError(
            f"{where}: runtimes must all be positive, or all zero in an unlabelled split; leave out what failed."
        )
    if positive.all() and not (normalizer > 0).all():
        raise FileFormatError(f"{where}: every runtime needs a positive normalizer.")
