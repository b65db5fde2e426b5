"""One graph of a layout collection: the operations of a whole program, and configurations that lay out its tensors.

A configuration gives each configurable node 18 small numbers, so all of them together, (configurations, nodes, 18), may
be far larger than memory. A file is therefore converted once: the numbers stream out of the npz a few MiB at a time and
lie as bytes in a flat file that the operating system pages in, and a step of training reads the few rows it draws.
Sizes are checked before anything is allocated or written, and nothing is unpickled.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._files import open_input, read_json_input, write_atomic
from tilewise.costmodel.data.kernel import check_graph, check_integers, check_runtimes, check_shape
from tilewise.costmodel.data.npz import Array, npz_bytes, read_npz, stream_npz
from tilewise.costmodel.data.schema import LAYOUT_FEATURES, NODE_FEATURES
from tilewise.costmodel.data.shards import INDEX, convert_once, files_key, map_array
from tilewise.errors import FileFormatError, UnavailableError

KEYS = ("node_feat", "node_opcode", "edge_index", "node_config_ids", "config_runtime")
CONFIGS = "node_config_feat"
WIDTH = len(LAYOUT_FEATURES)
MAX_FILE_BYTES = 4 << 30
MAX_CONVERTED_BYTES = 64 << 30
_FORMAT = "layout 1"
# file stem -> (dtype, what it has a row for, shape of a row)
_COLUMNS: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "node_feat": ("<f4", "nodes", (len(NODE_FEATURES),)),
    "node_opcode": ("|u1", "nodes", ()),
    "edge_index": ("<i4", "edges", (2,)),
    "config_ids": ("<i4", "places", ()),
    "runtime": ("<i8", "configs", ()),
}


@dataclass(frozen=True, eq=False)
class LayoutGraph:
    """A graph of n nodes, nc of them configurable, and c configurations; `runtime` is all zero where it is withheld."""

    name: str
    node_feat: npt.NDArray[np.float32]  # (n, 140)
    node_opcode: npt.NDArray[np.uint8]  # (n,)
    edge_index: npt.NDArray[np.int32]  # (m, 2): row [u, v], u consumes the output of v
    config_ids: npt.NDArray[np.int32]  # (nc,): which nodes are configurable
    config_feat: npt.NDArray[np.int8]  # (c, nc, 18): dimensions from minor to major, -1 where there is none
    runtime: npt.NDArray[np.int64]  # (c,)

    @property
    def n_nodes(self) -> int:
        return len(self.node_opcode)

    @property
    def n_configs(self) -> int:
        return len(self.runtime)

    @property
    def labelled(self) -> bool:
        return bool(self.n_configs) and bool(self.runtime[0] > 0)

    def target(self, rows: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float64]:
        """Runtimes over the fastest."""
        if not self.labelled:
            raise FileFormatError(f"Graph {self.name} has no runtimes: its split is unlabelled.")
        runtime = self.runtime if rows is None else self.runtime[rows]
        return np.asarray(runtime / self.runtime.min(), dtype=np.float64)


def make_graph(
    name: str,
    node_feat: Array,
    node_opcode: Array,
    edge_index: Array,
    node_config_ids: Array,
    config_runtime: Array,
    node_config_feat: Array,
    *,
    where: str = "graph",
) -> LayoutGraph:
    """A checked graph from arrays as they stand in the files."""
    parts = _checked(node_feat, node_opcode, edge_index, node_config_ids, config_runtime, where=where)
    check_shape(node_config_feat, (len(parts["runtime"]), len(parts["config_ids"]), WIDTH), f"{where}: {CONFIGS}")
    return LayoutGraph(name, config_feat=_as_bytes(node_config_feat, where), **parts)


def write_graph(path: Path, graph: LayoutGraph) -> None:
    """Write a graph as TpuGraphs does, in its names and number types."""
    arrays: dict[str, Array] = {
        "node_feat": graph.node_feat,
        "node_opcode": graph.node_opcode,
        "edge_index": graph.edge_index.astype(np.int64),
        "node_config_ids": graph.config_ids.astype(np.int64),
        "node_config_feat": graph.config_feat.astype(np.float32),
        "node_splits": np.array([[0, graph.n_nodes]], np.int64),
        "config_runtime": graph.runtime,
    }
    write_atomic(path, npz_bytes(arrays))


def open_graph(path: Path, cache_dir: Path) -> LayoutGraph:
    """The graph of one npz file, converted under `cache_dir` unless that was done before."""
    open_input(path, MAX_FILE_BYTES).close()
    folder = cache_dir / files_key([path], _FORMAT)
    if not (folder / INDEX).is_file():
        convert_once(folder, lambda unfinished: _convert(path, unfinished))
    return _open(folder, path.stem)


def _convert(path: Path, folder: Path) -> None:
    arrays = read_npz(path, KEYS, max_file_bytes=MAX_FILE_BYTES)
    parts = _checked(*(arrays[key] for key in KEYS), where=str(path))
    shape = (len(parts["runtime"]), len(parts["config_ids"]), WIDTH)
    _check_room(math.prod(shape), folder, path)
    for stem, (dtype, _, _) in _COLUMNS.items():
        (folder / f"{stem}.bin").write_bytes(np.ascontiguousarray(parts[stem], dtype=dtype).tobytes())
    with (folder / f"{CONFIGS}.bin").open("wb") as file:
        for piece in stream_npz(path, CONFIGS, shape, MAX_FILE_BYTES):
            file.write(_as_bytes(piece, str(path)).data)
        file.flush()
        os.fsync(file.fileno())
    counts = {rows: len(parts[stem]) for stem, (_, rows, _) in _COLUMNS.items()}
    write_atomic(folder / INDEX, json.dumps(counts))


def _check_room(size: int, folder: Path, path: Path) -> None:
    if size > MAX_CONVERTED_BYTES:
        raise FileFormatError(f"{path} has {size} numbers in its configurations; at most {MAX_CONVERTED_BYTES}.")
    free = shutil.disk_usage(folder).free
    if size > free:
        raise UnavailableError(
            f"{path} takes {size >> 20} MiB once converted, and {folder.parent} has {free >> 20} left; "
            "name another folder with cache_dir."
        )


def _open(folder: Path, name: str) -> LayoutGraph:
    try:
        counts = read_json_input(folder / INDEX, 1 << 16)
        if not all(type(counts[rows]) is int and 0 <= counts[rows] < 1 << 40 for _, rows, _ in _COLUMNS.values()):
            raise ValueError(counts)
        parts = {
            stem: _mapped(folder / f"{stem}.bin", dtype, (counts[rows], *row))
            for stem, (dtype, rows, row) in _COLUMNS.items()
        }
        shape = (counts["configs"], counts["places"], WIDTH)
        return LayoutGraph(name, config_feat=_mapped(folder / f"{CONFIGS}.bin", "|i1", shape), **parts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, UnavailableError) as error:
        raise FileFormatError(
            f"The converted data in {folder} is damaged; remove that folder and run again."
        ) from error


def _mapped(path: Path, dtype: str, shape: tuple[int, ...]) -> Array:
    if path.stat().st_size != np.dtype(dtype).itemsize * math.prod(shape):
        raise ValueError(shape)
    return map_array(path, dtype, shape)


def _checked(
    node_feat: Array, node_opcode: Array, edge_index: Array, config_ids: Array, config_runtime: Array, *, where: str
) -> dict[str, Any]:
    """Everything but the configurations, checked, under the names of `LayoutGraph`."""
    parts = check_graph(node_feat, node_opcode, edge_index, config_runtime, where)
    n, places = len(parts["node_opcode"]), len(np.atleast_1d(config_ids))
    if not 1 <= places <= n:
        raise FileFormatError(f"{where}: {places} of {n} nodes are configurable; at least one must be, and no more.")
    check_shape(config_ids, (places,), f"{where}: node_config_ids")
    check_runtimes(parts["runtime"], np.ones(1, np.int64), where)
    return parts | {"config_ids": check_integers(config_ids, 0, n - 1, f"{where}: node_config_ids").astype(np.int32)}


def _as_bytes(values: Array, where: str) -> npt.NDArray[np.int8]:
    with np.errstate(invalid="ignore"):
        small = values.astype(np.int8)
    if not (small == values).all():
        raise FileFormatError(f"{where}: {CONFIGS} holds a value that is no dimension's number.")
    return small
