"""A split as six flat files that the operating system pages in on demand and all processes share.

Thousands of small compressed files become one memory-mapped array per key plus a table of offsets: opening a split of
13 million configurations then costs nothing, and a kernel is a handful of views. The folder is written under a
temporary name while a lock is held and renamed when whole, so a killed conversion leaves nothing that could be mistaken
for a finished one, and of two converters one works while the other waits. An import of very many kernels writes its
splits in this form at once (`SplitWriter`): a million small files take longer to make and to read than all the rest.
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

from tilewise._files import locked, read_json_input, write_whole
from tilewise.costmodel.data.kernel import Kernel, program_of, read_kernel
from tilewise.costmodel.data.npz import Array
from tilewise.costmodel.data.progress import track
from tilewise.costmodel.data.schema import N_OPCODES, NODE_FEATURES, Schema
from tilewise.errors import FileFormatError, UnavailableError

INDEX = "index.json"
_FORMAT = 3
_MAX_INDEX_BYTES = 256 << 20
_NUMBERS_AT_ONCE = 1 << 22
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


def open_packed(folder: Path, schema: Schema) -> Split:
    """The split that lies in `folder` in this form; it may have come from anywhere, so its numbers are checked."""
    split = _open(folder, schema)
    nodes, edges = (np.diff(split.offsets(rows)) for rows in ("nodes", "edges"))
    ends = np.repeat(nodes, edges)[:, None]
    sound = bool(nodes.all() and np.diff(split.offsets("configs")).all())
    sound = sound and bool((split.column("node_opcode") < N_OPCODES).all())
    sound = sound and bool(((split.column("edge_index") >= 0) & (split.column("edge_index") < ends)).all())
    for column in ("runtime", "normalizer", "node_feat", "config_feat"):
        for piece in _pieces(split.column(column)):
            sound = sound and bool(np.isfinite(piece).all() if piece.dtype.kind == "f" else (piece > 0).all())
    if not sound:
        raise FileFormatError(f"{folder} is damaged: edges, runtimes or features that no kernel has.")
    return split


def _pieces(array: Array) -> Iterator[Array]:
    flat = array.reshape(-1)
    return (flat[low : low + _NUMBERS_AT_ONCE] for low in range(0, len(flat), _NUMBERS_AT_ONCE))


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
    labelled: bool | None = None
    with SplitWriter(folder) as writer:
        for path in track(files, label, len(files), progress):
            kernel = read_kernel(path, schema.width)
            labelled = kernel.labelled if labelled is None else labelled
            if kernel.labelled != labelled:
                raise FileFormatError(f"{path}: some kernels of this split have runtimes and some have none.")
            writer.add(kernel)


class SplitWriter:
    """A context that takes the kernels of a split one by one; its index is there when the block ends well.

    What is written `beside` the columns has a file of its own, `NAME.bin`, and the length of each kernel's part is
    counted in the index.
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
            counts = {rows: counted.tolist() for rows, counted in self._counts.items()}
            write_whole(self._folder / INDEX, json.dumps({"names": self._names, "counts": counts}))

    def add(self, kernel: Kernel, **beside: Array) -> None:
        for column, dtype, stream in self._columns:
            stream.write(np.ascontiguousarray(getattr(kernel, column), dtype).tobytes())
        for name, array in beside.items():
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
