"""Graphs of a layout collection: the operations of a whole program, and configurations of its tensor layouts.

A configuration has 18 small numbers for each configurable node, so the array of all configurations, (configurations,
nodes, 18), may be far larger than memory. It is therefore converted once: the numbers are streamed from the npz a few
MiB at a time to a flat file of bytes, which the operating system pages in; a training step reads only the rows it
samples. Sizes are checked before anything is allocated or written, and nothing is unpickled.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._atomic import write_atomic
from tilewise.costmodel.data.dataset import SPLITS
from tilewise.costmodel.data.kernel import check_graph, check_integers, check_runtimes, check_shape
from tilewise.costmodel.data.npz import Array, read_npz
from tilewise.costmodel.data.npz_stream import stream_npz
from tilewise.costmodel.data.schema import LAYOUT_FEATURES
from tilewise.costmodel.data.shards import convert_once, default_cache_dir, files_key, map_array, track
from tilewise.costmodel.data.writing import npz_bytes
from tilewise.errors import ConfigurationError, FileFormatError, UnavailableError

KEYS = ("node_feat", "node_opcode", "edge_index", "node_config_ids", "config_runtime")
CONFIGS = "node_config_feat"
WIDTH = len(LAYOUT_FEATURES)
MAX_FILE_BYTES = 4 << 30
MAX_CONVERTED_BYTES = 64 << 30
_FORMAT = "layout 2"  # version of the converted files

SOURCES, SEARCHES = ("xla", "nlp"), ("random", "default")
COLLECTIONS = tuple(f"{source}:{search}" for source in SOURCES for search in SEARCHES)


@dataclass(frozen=True, eq=False)
class LayoutGraph:
    """A graph with n nodes, nc of them configurable, and c configurations; `runtime` is all zero if unlabelled."""

    name: str
    node_feat: npt.NDArray[np.float32]  # (n, 140)
    node_opcode: npt.NDArray[np.uint8]  # (n,)
    edge_index: npt.NDArray[np.int32]  # (m, 2): row [u, v], u consumes the output of v
    config_ids: npt.NDArray[np.int32]  # (nc,): indices of the configurable nodes
    config_feat: npt.NDArray[np.int8]  # (c, nc, 18): dimensions from minor to major, -1 beyond the rank
    runtime: npt.NDArray[np.int64]  # (c,) nanoseconds

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
        """Return the runtimes divided by the fastest, of all configurations or of the given rows."""
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
    """Build a graph from the arrays of a file and check them; `where` opens the error messages."""
    arrays = _check_arrays(node_feat, node_opcode, edge_index, node_config_ids, config_runtime, where=where)
    check_shape(node_config_feat, (len(arrays["runtime"]), len(arrays["config_ids"]), WIDTH), f"{where}: {CONFIGS}")
    return LayoutGraph(name, config_feat=_to_int8(node_config_feat, where), **arrays)


def write_graph(path: Path, graph: LayoutGraph) -> None:
    """Write a graph with the array names and dtypes of TpuGraphs."""
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
    """Open the graph of one npz file; its configurations are converted once, to a file under `cache_dir`."""
    raw_arrays = read_npz(path, KEYS, max_file_bytes=MAX_FILE_BYTES)
    arrays = _check_arrays(*(raw_arrays[key] for key in KEYS), where=str(path))
    # The size of the configurations follows from the other arrays, so it is known before they are read.
    shape = (len(arrays["runtime"]), len(arrays["config_ids"]), WIDTH)
    folder = cache_dir / files_key([path], _FORMAT)
    if not folder.is_dir():
        convert_once(folder, lambda unfinished: _convert(path, shape, unfinished))
    flat_file = folder / f"{CONFIGS}.bin"
    # `np.memmap` accepts a file that is too long.
    if not flat_file.is_file() or flat_file.stat().st_size != math.prod(shape):
        raise FileFormatError(f"The converted data in {folder} is damaged; remove that folder and run again.")
    return LayoutGraph(path.stem, config_feat=map_array(flat_file, "|i1", shape), **arrays)


def _convert(path: Path, shape: tuple[int, ...], folder: Path) -> None:
    """Write the configurations of an npz file to a flat file in `folder`; raise if the disk is too small."""
    size, free = math.prod(shape), shutil.disk_usage(folder).free
    if size > MAX_CONVERTED_BYTES:
        raise FileFormatError(
            f"{path} has {size} numbers in its configurations; at most {MAX_CONVERTED_BYTES} are allowed."
        )
    if size > free:
        raise UnavailableError(
            f"{path} needs {size >> 20} MiB when converted, and {folder.parent} has {free >> 20} MiB left; "
            "pass another folder as cache_dir."
        )
    with (folder / f"{CONFIGS}.bin").open("wb") as file:
        for chunk in stream_npz(path, CONFIGS, shape, MAX_FILE_BYTES):
            file.write(_to_int8(chunk, str(path)).data)
        file.flush()
        os.fsync(file.fileno())


def _check_arrays(
    node_feat: Array, node_opcode: Array, edge_index: Array, config_ids: Array, config_runtime: Array, *, where: str
) -> dict[str, Any]:
    """Check a layout graph's arrays except configurations; return them by field name of `LayoutGraph`."""
    arrays = check_graph(node_feat, node_opcode, edge_index, config_runtime, where)
    n, n_configurable = len(arrays["node_opcode"]), len(np.atleast_1d(config_ids))
    if not 1 <= n_configurable <= n:
        raise FileFormatError(f"{where}: {n_configurable} of {n} nodes are configurable; it must be 1 to {n}.")
    check_shape(config_ids, (n_configurable,), f"{where}: node_config_ids")
    # Layout files have no normalizers; a constant 1 satisfies the check.
    check_runtimes(arrays["runtime"], np.ones(1, np.int64), where)
    return arrays | {"config_ids": check_integers(config_ids, 0, n - 1, f"{where}: node_config_ids").astype(np.int32)}


def _to_int8(values: Array, where: str) -> npt.NDArray[np.int8]:
    """Convert configuration numbers to int8; raise `FileFormatError` if that changes one of them."""
    with np.errstate(invalid="ignore"):
        converted = values.astype(np.int8)
    if not (converted == values).all():
        raise FileFormatError(f"{where}: {CONFIGS} contains a value that is not the number of a dimension.")
    return converted


@dataclass(frozen=True, eq=False)
class LayoutDataset:
    """The three splits of a layout collection, and its name (``xla:random``) if its folders are named like that."""

    name: str
    train: Sequence[LayoutGraph]
    valid: Sequence[LayoutGraph]
    test: Sequence[LayoutGraph]

    def split(self, name: str) -> Sequence[LayoutGraph]:
        """Return the graphs of the split with this name: train, valid or test."""
        if name not in SPLITS:
            raise ConfigurationError(f"There is no split {name!r}; use train, valid or test.")
        graphs: Sequence[LayoutGraph] = getattr(self, name)
        return graphs


def open_layouts(
    root: str | os.PathLike[str],
    *,
    splits: Sequence[str] = SPLITS,
    cache_dir: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    progress: bool = True,
) -> LayoutDataset:
    """Open the layout collection in the folder `root`; `limit` loads only that many files of each split.

    >>> open_layouts("~/data/tpugraphs/npz/layout/xla/random").train[0].config_feat.shape  # doctest: +SKIP
    (47712, 26, 18)
    """
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise ConfigurationError(f"There is no layout collection at {root}; give a folder with train, valid and test.")
    unknown = [name for name in splits if name not in SPLITS]
    if unknown:
        raise ConfigurationError(f"There is no split {unknown[0]!r}; use train, valid or test.")
    # Splits that were not requested stay empty.
    files = {name: sorted((folder / name).glob("*.npz"))[:limit] if name in splits else [] for name in SPLITS}
    if not any(files.values()):
        raise FileFormatError(f"{folder} contains no npz files in {', '.join(splits)}.")
    cache = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    # Opening converts a graph once and then maps its files, so that a split may exceed the memory.
    graphs = {
        name: [open_graph(path, cache) for path in track(paths, f"reading {name}", len(paths), progress)]
        for name, paths in files.items()
    }
    return LayoutDataset(collection_name(folder), **graphs)


def collection_name(folder: Path) -> str:
    """Return ``xla:random`` for ``…/xla/random``, or an empty text if the folders have other names."""
    name = ":".join(folder.absolute().parts[-2:])
    return name if name in COLLECTIONS else ""


def check_name(name: str) -> str:
    """Return `name`; raise `ConfigurationError` unless it is one of the four collections."""
    if name not in COLLECTIONS:
        short_name = re.sub(r"\s+", " ", name)[:80]
        raise ConfigurationError(f"{short_name!r} is not a layout collection; use one of {', '.join(COLLECTIONS)}.")
    return name
