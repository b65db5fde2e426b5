"""A measured kernel: a graph of tensor operations, its candidate tile configurations, and their runtimes.

`make_kernel` is the only way from arrays of a file to a `Kernel`. It checks everything the rest of the package relies
on: shapes, dtypes, edges inside the graph, finite features, and runtimes that are all positive or, in an unlabelled
split, all zero. `shards.read_kernel` reads the arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.schema import N_OPCODES, NODE_FEATURES
from tilewise.errors import FileFormatError

if TYPE_CHECKING:
    from tilewise.costmodel.data.npz import Array

# Limits for untrusted files, far above TpuGraphs' largest kernel.
_MAX_INTEGER_NS = 1 << 62
MAX_NODES = 1_000_000
MAX_EDGES = 16_000_000
MAX_CONFIGS = 10_000_000


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel with n nodes, m edges and c configurations; `runtime` is all zero in an unlabelled split."""

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
        """Return runtimes divided by the default configuration's: (c,), below 1 is faster than the default."""
        if not self.labelled:
            raise FileFormatError(f"Kernel {self.name} has no runtimes: its split is unlabelled.")
        return np.asarray(self.runtime / self.normalizer, dtype=np.float64)


def program_of(name: str) -> str:
    """Return the program part of a kernel's name: the text before the last underscore, or the whole name.

    >>> program_of("resnet50_4x4_fp16_83")
    'resnet50_4x4_fp16'
    """
    return name.rpartition("_")[0] or name


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
    """Build a `Kernel` from the arrays of a file and check them; `where` opens the error messages."""
    width = config_feat.shape[-1] if width is None and config_feat.ndim == 2 else width
    graph = check_graph(node_feat, node_opcode, edge_index, config_runtime, where)
    c = len(graph["runtime"])
    # A wrong number of columns gets its own message before the general check of the shape.
    if config_feat.ndim == 2 and config_feat.shape[1] != width:
        raise FileFormatError(
            f"{where}: config_feat has {config_feat.shape[1]} columns where {width} are needed; list other columns as "
            "config_features in a schema.json beside train."
        )
    check_shape(config_feat, (c, width or 0), f"{where}: config_feat")
    check_shape(config_runtime_normalizers, (c,), f"{where}: config_runtime_normalizers")
    normalizer = check_integers(config_runtime_normalizers, 0, _MAX_INTEGER_NS, f"{where}: config_runtime_normalizers")
    check_runtimes(graph["runtime"], normalizer, where)
    features = check_floats(config_feat, f"{where}: config_feat")
    return Kernel(name, program_of(name), config_feat=features, normalizer=normalizer.astype(np.int64), **graph)


def check_graph(
    node_feat: Array, node_opcode: Array, edge_index: Array, config_runtime: Array, where: str
) -> dict[str, Any]:
    """Check the arrays that tile files and layout files share; return them under the field names of `Kernel`."""
    # The lengths are checked before any array is converted, so that no file makes us copy much.
    n, m, c = (len(np.atleast_1d(array)) for array in (node_opcode, edge_index, config_runtime))
    if not (1 <= n <= MAX_NODES and 1 <= c <= MAX_CONFIGS and m <= MAX_EDGES):
        raise FileFormatError(
            f"{where}: has {n} nodes, {m} edges and {c} configurations; it needs 1 to {MAX_NODES:,} nodes, at most "
            f"{MAX_EDGES:,} edges and 1 to {MAX_CONFIGS:,} configurations."
        )
    check_shape(node_feat, (n, len(NODE_FEATURES)), f"{where}: node_feat")
    check_shape(node_opcode, (n,), f"{where}: node_opcode")
    check_shape(edge_index, (m, 2), f"{where}: edge_index")
    check_shape(config_runtime, (c,), f"{where}: config_runtime")
    return {
        "node_feat": check_floats(node_feat, f"{where}: node_feat"),
        "node_opcode": check_integers(node_opcode, 0, N_OPCODES - 1, f"{where}: node_opcode").astype(np.uint8),
        "edge_index": check_integers(edge_index, 0, n - 1, f"{where}: edge_index").astype(np.int32),
        "runtime": check_integers(config_runtime, 0, _MAX_INTEGER_NS, f"{where}: config_runtime").astype(np.int64),
    }


def check_shape(array: Array, shape: tuple[int, ...], where: str) -> None:
    """Raise `FileFormatError` unless the array has this shape."""
    if array.shape != shape:
        raise FileFormatError(f"{where} has shape {array.shape} where {shape} is needed.")


def check_floats(array: Array, where: str) -> npt.NDArray[np.float32]:
    """Convert to float32; raise `FileFormatError` unless every value is a finite number."""
    if array.dtype.kind not in "fiu":
        raise FileFormatError(f"{where} has type {array.dtype}; numbers are needed.")
    # Values beyond float32 become infinite and are refused below.
    with np.errstate(over="ignore"):
        values = array.astype(np.float32)
    if not np.isfinite(values).all():
        raise FileFormatError(f"{where} contains a value that is not a finite float32.")
    return values


def check_integers(array: Array, low: int, high: int, where: str) -> Array:
    """Return the array; raise `FileFormatError` unless its values are integers between `low` and `high`."""
    if array.dtype.kind not in "iu":
        raise FileFormatError(f"{where} has type {array.dtype}; integers are needed.")
    if array.size and (int(array.min()) < low or int(array.max()) > high):
        offender = int(array.min()) if int(array.min()) < low else int(array.max())
        raise FileFormatError(f"{where} contains {offender}, outside {low} to {high}.")
    return array


def check_runtimes(runtime: Array, normalizer: Array, where: str) -> None:
    """Raise `FileFormatError` unless the runtimes are all positive, with normalizers, or all zero."""
    positive = runtime > 0
    if positive.any() and not positive.all():
        raise FileFormatError(
            f"{where}: runtimes must all be positive, or all zero in an unlabelled split; omit failed configurations."
        )
    if positive.all() and not (normalizer > 0).all():
        raise FileFormatError(f"{where}: every runtime needs a positive normalizer.")


def ranking(scores: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Return configuration indices from the fastest predicted to the slowest."""
    return np.argsort(np.asarray(scores), kind="stable").astype(np.int64)
