"""A split as six flat files that the operating system pages in on demand and all processes share.

Thousands of small compressed files become one memory-mapped array per key plus a table of offsets: opening a split of
13 million configurations then costs nothing, and a kernel is a handful of views. The folder is written under a
temporary name while a lock is held and renamed when whole, so a killed conversion leaves nothing that could be mistaken
for a finished one, and of two converters one works while the other waits.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, overload

import numpy as np

from tilewise._files import locked, read_json_input, write_whole
from tilewise.costmodel.data.kernel import Kernel, program_of, read_kernel
from tilewise.costmodel.data.npz import Array
from tilewise.costmodel.data.progress import track
from tilewise.costmodel.data.schema import NODE_FEATURES, Schema
from tilewise.errors import FileFormatError, UnavailableError

INDEX = "index.json"
_FORMAT = 3
_MAX_INDEX_BYTES = 64 << 20
# file stem -> (dtype, whether one row per node, edge or configuration)
_COLUMNS = {
    "node_feat": ("<f4", "nodes"),
    "node_opcode": ("|u1", "nodes"),
    "edge_index": ("<i4", "edges"),
    "config_feat": ("<f4", "configs"),
    "runtime": ("<i8", "configs"),
    "normalizer": ("<i8", "configs"),
}


class Split(Sequence[Kernel]):
    """The kernels of one split, each made of views into the shards when asked for."""

    def __init__(
        self, names: Sequence[str], offsets: dict[str, Array], arrays: dict[str, Array], schema: Schema
    ) -> None:
        self.names = list(names)
        self.schema = schema
        self._offsets = offsets
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> Kernel: ...
    @overload
    def __getitem__(self, index: slice) -> list[Kernel]: ...
    def __getitem__(self, index: int | slice) -> Kernel | list[Kernel]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        parts = {}
        for column, (_, rows) in _COLUMNS.items():
            first, last = self._offsets[rows][position : position + 2]
            parts[column] = self._arrays[column][first:last]
        name = self.names[position]
        return Kernel(name=name, program=program_of(name), **parts)

    @property
    def n_configs(self) -> int:
        return int(self._offsets["configs"][-1])

    @property
    def labelled(self) -> bool:
        return len(self) > 0 and self[0].labelled

    @property
    def programs(self) -> list[str]:
        return [program_of(name) for name in self.names]

    def column(self, name: str) -> Array:
        """One whole flat array, such as ``node_feat`` of every node in the split."""
        return self._arrays[name]

    def offsets(self, rows: str) -> Array:
        """Where each kernel's ``nodes``, ``edges`` or ``configs`` begin, and after the last, the total."""
        return self._offsets[rows]


def open_split(files: Sequence[Path], schema: Schema, cache_dir: Path, label: str, progress: bool = True) -> Split:
    """The split made of `files`, converted under `cache_dir` unless that was done before."""
    if not files:
        return from_kernels([], schema)
    folder = cache_dir / _key(files, schema)
    if not (folder / INDEX).is_file():
        convert_once(folder, lambda unfinished: _convert(files, schema, unfinished, label, progress))
    return _open(folder, schema)


def from_kernels(kernels: Sequence[Kernel], schema: Schema) -> Split:
    """A split held in memory, for a few kernels that come from elsewhere than files."""
    width = {"node_feat": (len(NODE_FEATURES),), "edge_index": (2,), "config_feat": (schema.width,)}
    offsets = {
        "nodes": np.cumsum([0, *(k.n_nodes for k in kernels)], dtype=np.int64),
        "edges": np.cumsum([0, *(len(k.edge_index) for k in kernels)], dtype=np.int64),
        "configs": np.cumsum([0, *(k.n_configs for k in kernels)], dtype=np.int64),
    }
    arrays = {
        column: np.concatenate([np.empty((0, *width.get(column, ())), dtype), *(getattr(k, column) for k in kernels)])
        for column, (dtype, _) in _COLUMNS.items()
    }
    return Split([k.name for k in kernels], offsets, arrays, schema)


def _key(files: Sequence[Path], schema: Schema) -> str:
    return files_key(files, f"{_FORMAT} {schema.config_features}")


def files_key(files: Sequence[Path], version: str) -> str:
    """A name for what is made of `files` as they are now."""
    digest = hashlib.sha256(version.encode())
    for path in files:
        status = path.stat()
        digest.update(f"{path.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def convert_once(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make `folder` by filling an unfinished one, unless another process has made it meanwhile."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_suffix(".lock")):
            if (folder / INDEX).is_file():
                return
            unfinished = folder.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            try:
                fill(unfinished)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise UnavailableError(
            f"The converted data cannot be written under {folder.parent} ({error.strerror or error}); "
            "name another folder with cache_dir."
        ) from error


def _convert(files: Sequence[Path], schema: Schema, folder: Path, label: str, progress: bool) -> None:
    counts: dict[str, list[int]] = {"nodes": [], "edges": [], "configs": []}
    labelled: bool | None = None
    with contextlib.ExitStack() as stack:
        streams = {column: stack.enter_context((folder / f"{column}.bin").open("wb")) for column in _COLUMNS}
        for path in track(files, label, len(files), progress):
            kernel = read_kernel(path, schema.width)
            labelled = kernel.labelled if labelled is None else labelled
            if kernel.labelled != labelled:
                raise FileFormatError(f"{path}: some kernels of this split have runtimes and some have none.")
            _append(kernel, streams, counts)
        for stream in streams.values():
            stream.flush()
            os.fsync(stream.fileno())
    write_whole(folder / INDEX, json.dumps({"names": [path.stem for path in files], "counts": counts}))


def _append(kernel: Kernel, streams: Mapping[str, IO[bytes]], counts: dict[str, list[int]]) -> None:
    for column, (dtype, _) in _COLUMNS.items():
        array = np.ascontiguousarray(getattr(kernel, column), dtype=dtype)
        streams[column].write(array.data if array.size else b"")
    counts["nodes"].append(kernel.n_nodes)
    counts["edges"].append(len(kernel.edge_index))
    counts["configs"].append(kernel.n_configs)


def _open(folder: Path, schema: Schema) -> Split:
    widths = {"node_feat": len(NODE_FEATURES), "edge_index": 2, "config_feat": schema.width}
    try:
        index = read_json_input(folder / INDEX, _MAX_INDEX_BYTES)
        names, offsets = _checked_index(index)
        arrays = {}
        for column, (dtype, rows) in _COLUMNS.items():
            total = int(offsets[rows][-1])
            shape = (total, widths[column]) if column in widths else (total,)
            arrays[column] = map_array(folder / f"{column}.bin", dtype, shape)
        return Split(names, offsets, arrays, schema)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, UnavailableError) as error:
        raise FileFormatError(
            f"The converted data in {folder} is damaged; remove that folder and run again."
        ) from error


def _checked_index(index: Any) -> tuple[list[str], dict[str, Array]]:
    """The names and where each kernel's rows begin; ValueError where an index cannot be one that `_convert` wrote."""
    names = [str(name) for name in index["names"]]
    offsets = {}
    for rows in ("nodes", "edges", "configs"):
        counts = index["counts"][rows]
        if len(counts) != len(names) or not all(type(count) is int and 0 <= count < 1 << 40 for count in counts):
            raise ValueError(rows)
        offsets[rows] = np.cumsum([0, *counts], dtype=np.int64)
    return names, offsets


def map_array(path: Path, dtype: str, shape: tuple[int, ...]) -> Array:
    """The array that a file of nothing but its numbers holds, paged in on demand."""
    if 0 in shape:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=shape)
