"""Stores a split as six flat memory-mapped files that the operating system pages in on demand.

Thousands of small compressed files become one array per key plus a table of offsets. Opening a split then reads only
the index, and a kernel is a handful of views. The folder is written under a temporary name while a lock is held and is
renamed when complete: an interrupted conversion leaves no folder that looks complete, and a second converter waits for
the first. Imports of very many kernels write this form directly (`SplitWriter`), because creating and reading a million
small files would dominate their time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from array import array as array_of
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, overload

import numpy as np

from tilewise._files import file_lock, read_json_input, write_atomic
from tilewise.costmodel.data.kernel import Kernel, program_of, read_kernel
from tilewise.costmodel.data.npz import Array
from tilewise.costmodel.data.progress import track
from tilewise.costmodel.data.schema import N_OPCODES, NODE_FEATURES, Schema
from tilewise.errors import FileFormatError, UnavailableError

INDEX = "index.json"
_FORMAT = 3  # version of the converted files
_MAX_INDEX_BYTES = 256 << 20  # limit for untrusted files; enough for a few million kernels
_CHUNK_NUMBERS = 1 << 22  # 16 to 32 MiB, so that checking does not load a whole memory-mapped array
# File stem -> (dtype, what a row of the array describes).
_COLUMNS = {
    "node_feat": ("<f4", "nodes"),
    "node_opcode": ("|u1", "nodes"),
    "edge_index": ("<i4", "edges"),
    "config_feat": ("<f4", "configs"),
    "runtime": ("<i8", "configs"),
    "normalizer": ("<i8", "configs"),
}


class Split(Sequence[Kernel]):
    """The kernels of one split; a kernel is built from views of the flat arrays on access."""

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
        """Return one kernel, or a list of them for a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        # `range` resolves negative indices and raises IndexError.
        position = range(len(self))[index]
        views = {}
        for column, (_, rows) in _COLUMNS.items():
            first, last = self._offsets[rows][position : position + 2]
            views[column] = self._arrays[column][first:last]
        name = self.names[position]
        return Kernel(name=name, program=program_of(name), **views)

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
        """Return a flat array over all kernels, such as ``node_feat`` of every node in the split."""
        return self._arrays[name]

    def offsets(self, rows: str) -> Array:
        """Return the first row of each kernel's ``nodes``, ``edges`` or ``configs``, followed by the total."""
        return self._offsets[rows]


def open_split(files: Sequence[Path], schema: Schema, cache_dir: Path, label: str, progress: bool = True) -> Split:
    """Open the split that consists of `files`; convert them under `cache_dir` unless that was done before."""
    if not files:
        return from_kernels([], schema)
    # The key covers the schema too: other column names mean other data.
    folder = cache_dir / files_key(files, f"{_FORMAT} {schema.config_features}")
    if not (folder / INDEX).is_file():
        convert_once(folder, lambda unfinished: _convert(files, schema, unfinished, label, progress))
    return _open(folder, schema)


def open_packed(folder: Path, schema: Schema) -> Split:
    """Open a split of flat files from an untrusted source; raise `FileFormatError` if a value is not possible."""
    split = _open(folder, schema)
    # The columns are checked in chunks because a memory-mapped array may exceed the memory.
    nodes, edges = (np.diff(split.offsets(rows)) for rows in ("nodes", "edges"))
    node_limit = np.repeat(nodes, edges)[:, None]  # (edges, 1): an edge connects nodes of its own kernel
    valid = bool(nodes.all() and np.diff(split.offsets("configs")).all())
    valid = valid and bool((split.column("node_opcode") < N_OPCODES).all())
    valid = valid and bool(((split.column("edge_index") >= 0) & (split.column("edge_index") < node_limit)).all())
    for column in ("runtime", "normalizer", "node_feat", "config_feat"):
        for chunk in _chunks(split.column(column)):
            valid = valid and bool(np.isfinite(chunk).all() if chunk.dtype.kind == "f" else (chunk > 0).all())
    if not valid:
        raise FileFormatError(f"{folder} is damaged: it contains impossible edges, runtimes or features.")
    return split


def _chunks(array: Array) -> Iterator[Array]:
    flat = array.reshape(-1)
    return (flat[low : low + _CHUNK_NUMBERS] for low in range(0, len(flat), _CHUNK_NUMBERS))


def from_kernels(kernels: Sequence[Kernel], schema: Schema) -> Split:
    """Build a split in memory from a few kernels."""
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


def files_key(files: Sequence[Path], version: str) -> str:
    """Return a cache key for data derived from `files`; it changes with their paths, sizes and times."""
    digest = hashlib.sha256(version.encode())
    for path in files:
        status = path.stat()
        digest.update(f"{path.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def convert_once(folder: Path, fill: Callable[[Path], None]) -> None:
    """Create `folder` by filling a temporary folder, unless another process creates it first."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A second process waits here and then finds the finished folder.
        with file_lock(folder.with_suffix(".lock")):
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
            "pass another folder as cache_dir."
        ) from error


def _convert(files: Sequence[Path], schema: Schema, folder: Path, label: str, progress: bool) -> None:
    """Read every kernel file and write the flat files; all kernels must have runtimes, or none."""
    labelled: bool | None = None
    with SplitWriter(folder) as writer:
        for path in track(files, label, len(files), progress):
            kernel = read_kernel(path, schema.width)
            labelled = kernel.labelled if labelled is None else labelled
            if kernel.labelled != labelled:
                raise FileFormatError(f"{path}: some kernels of this split have runtimes and others have none.")
            writer.add(kernel)


class SplitWriter:
    """Context manager that writes a split kernel by kernel; the index is written when the block ends without error.

    Each of the `extra_arrays` of `add` goes to its own file, `NAME.bin`; the index records its length per kernel.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._streams: dict[str, IO[bytes]] = {}
        self._names: list[str] = []
        self._counts = {rows: array_of("q") for rows in ("nodes", "edges", "configs")}
        self._columns = [(column, np.dtype(dtype), self._stream(column)) for column, (dtype, _) in _COLUMNS.items()]

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for stream in self._streams.values():
            stream.flush()
            if kind is None:
                os.fsync(stream.fileno())
            stream.close()
        if kind is None:
            counts = {rows: lengths.tolist() for rows, lengths in self._counts.items()}
            write_atomic(self._folder / INDEX, json.dumps({"names": self._names, "counts": counts}))

    def add(self, kernel: Kernel, **extra_arrays: Array) -> None:
        """Append a kernel, and further arrays of it under their names."""
        for column, dtype, stream in self._columns:
            stream.write(np.ascontiguousarray(getattr(kernel, column), dtype).tobytes())
        for name, array in extra_arrays.items():
            self._stream(name).write(array.tobytes())
            self._counts.setdefault(name, array_of("q")).append(len(array))
        self._names.append(kernel.name)
        self._counts["nodes"].append(len(kernel.node_opcode))
        self._counts["edges"].append(len(kernel.edge_index))
        self._counts["configs"].append(len(kernel.config_feat))

    def _stream(self, name: str) -> IO[bytes]:
        if name not in self._streams:
            self._streams[name] = (self._folder / f"{name}.bin").open("wb", buffering=1 << 20)
        return self._streams[name]


def _open(folder: Path, schema: Schema) -> Split:
    """Map the flat files of a folder; raise `FileFormatError` if they do not match the index."""
    # Columns that are not listed here have one number per row.
    widths = {"node_feat": len(NODE_FEATURES), "edge_index": 2, "config_feat": schema.width}
    try:
        index = read_json_input(folder / INDEX, _MAX_INDEX_BYTES)
        names, offsets = _parse_index(index)
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


def _parse_index(index: Any) -> tuple[list[str], dict[str, Array]]:
    """Return the kernels' names and offsets; raise an exception that `_open` handles if the index is malformed."""
    names = [str(name) for name in index["names"]]
    offsets = {}
    for rows in ("nodes", "edges", "configs"):
        counts = index["counts"][rows]
        if len(counts) != len(names) or not all(type(count) is int and 0 <= count < 1 << 40 for count in counts):
            raise ValueError(rows)
        offsets[rows] = np.cumsum([0, *counts], dtype=np.int64)
    return names, offsets


def map_array(path: Path, dtype: str, shape: tuple[int, ...]) -> Array:
    """Map a file of raw numbers as an array that is paged in on demand."""
    if 0 in shape:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=shape)
