"""Reads kernel files and stores a split as six flat memory-mapped files that the operating system pages in on demand.

Thousands of small compressed files become one array per key plus a table of offsets. Opening a split then reads only
the index, and a kernel is a handful of views. The folder is written under a temporary name while a lock is held and is
renamed when complete: an interrupted conversion leaves no folder that looks complete, and a second converter waits for
the first. Imports of very many kernels write this form directly (`SplitWriter`), because creating and reading a million
small files would dominate their time.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tilewise._atomic import file_lock
from tilewise._files import read_json_input
from tilewise._system import cache_folder
from tilewise.costmodel.data.collection import NOISE_KEYS, Collection, MeasuredKernel, attach_noise
from tilewise.costmodel.data.dataset import COLUMNS, INDEX, SPLITS, Split, from_kernels
from tilewise.costmodel.data.kernel import Kernel, make_kernel
from tilewise.costmodel.data.npz import Array, read_npz
from tilewise.costmodel.data.schema import N_OPCODES, NODE_FEATURES, Schema, read_schema
from tilewise.costmodel.data.writing import SplitWriter
from tilewise.errors import FileFormatError, UnavailableError

_FORMAT = 3  # version of the converted files
_GRAPH_KEYS, _CONFIG_KEYS = ("node_feat", "node_opcode", "edge_index"), ("config_feat", "config_runtime")
_NORMALIZERS = "config_runtime_normalizers"
_MAX_RUNTIME_NS = 1e18  # limit for untrusted files, far above TpuGraphs' largest kernel
_MAX_INDEX_BYTES = 256 << 20  # limit for untrusted files; enough for a few million kernels
_CHUNK_NUMBERS = 1 << 22  # 16 to 32 MiB, so that checking does not load a whole memory-mapped array

Item = TypeVar("Item")
_SECONDS_BETWEEN_LINES = 15.0  # arbitrary: a log of an hour stays under 250 lines


def read_kernel(path: Path, width: int) -> Kernel:
    """Read and check one npz file whose configurations have `width` features; keys beyond the six are ignored.

    A file without a graph gets a graph of one unknown instruction. A file without normalizers is normalized by the
    kernel's median runtime.
    """
    # The graph and the normalizers may be absent; a part of a graph may not.
    arrays = read_npz(path, _CONFIG_KEYS, (*_GRAPH_KEYS, _NORMALIZERS))
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
    return make_kernel(path.stem, width=width, where=str(path), **arrays)


def _whole_nanoseconds(runtime: Array, path: Path) -> Array:
    """Round float runtimes to integers, at least 1 if positive, because 0 means "not measured"."""
    if runtime.dtype.kind != "f":
        return runtime
    if not np.isfinite(runtime).all() or (runtime < 0).any() or (runtime > _MAX_RUNTIME_NS).any():
        raise FileFormatError(
            f"{path}: config_runtime contains a value that is not a time in nanoseconds; omit failed configurations."
        )
    return np.where(runtime > 0, np.maximum(1, np.rint(runtime)), 0).astype(np.int64)


def open_folder(
    folder: Path, schema: Schema, cache_dir: Path | None, limit: int | None, progress: bool
) -> dict[str, Split]:
    """Open the splits of a folder by name: npz files, which are converted once, or flat files of an import."""
    cache = cache_dir or default_cache_dir()
    packed = {name for name in SPLITS if (folder / name / INDEX).is_file()}
    files = {name: sorted((folder / name).glob("*.npz"))[:limit] for name in SPLITS if name not in packed}
    if not packed and not any(files.values()):
        raise FileFormatError(f"{folder} contains no train, valid or test folder with npz files.")
    splits = {name: open_split(paths, schema, cache, f"reading {name}", progress) for name, paths in files.items()}
    for name in packed:
        split = open_packed(folder / name, schema)
        splits[name] = split if limit is None else from_kernels(split[:limit], schema)
    return splits


def default_cache_dir() -> Path:
    """Return the folder of converted data under the user's cache folder."""
    return cache_folder() / "tiles"


def open_split(files: Sequence[Path], schema: Schema, cache_dir: Path, label: str, progress: bool = True) -> Split:
    """Open `files` as one split; they are converted to flat files under `cache_dir` the first time."""
    if not files:
        return from_kernels([], schema)
    # The key covers the schema too: other column names mean other data.
    folder = cache_dir / files_key(files, f"{_FORMAT} {schema.config_features}")
    if not folder.is_dir():
        convert_once(folder, lambda unfinished: _convert(files, schema, unfinished, label, progress))
    return _open_flat_files(folder, schema)


def open_packed(folder: Path, schema: Schema) -> Split:
    """Open a split of untrusted flat files; raise `FileFormatError` if a value is impossible."""
    split = _open_flat_files(folder, schema)
    # The columns are checked in chunks because a memory-mapped array may exceed the memory.
    nodes, edges = (np.diff(split.offsets(rows)) for rows in ("nodes", "edges"))
    node_limit = np.repeat(nodes, edges)[:, None]  # (edges, 1): an edge connects nodes of the same kernel
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


def files_key(files: Sequence[Path], version: str) -> str:
    """Return a cache key for data derived from `files`; it changes with their paths, sizes and times."""
    # Contents are not hashed: reading all files would take as long as converting them.
    digest = hashlib.sha256(version.encode())
    for path in files:
        status = path.stat()
        digest.update(f"{path.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def convert_once(folder: Path, fill: Callable[[Path], None]) -> None:
    """Create `folder` by `fill(temporary folder)`; keep the other one if a second process is faster."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A second process waits here and then finds the finished folder.
        with file_lock(folder.with_suffix(".lock")):
            if folder.is_dir():
                return
            # Remove what an interrupted conversion left, fill a new folder, and rename it as the last step.
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
    """Read npz files and write a split's flat files to `folder`; either all kernels or none have runtimes."""
    labelled: bool | None = None
    with SplitWriter(folder) as writer:
        for path in track(files, label, len(files), progress):
            kernel = read_kernel(path, schema.width)
            labelled = kernel.labelled if labelled is None else labelled
            if kernel.labelled != labelled:
                raise FileFormatError(f"{path}: some kernels of this split have runtimes and others have none.")
            writer.add(kernel)


def _open_flat_files(folder: Path, schema: Schema) -> Split:
    """Memory-map the flat files of a folder as a split; raise `FileFormatError` if their sizes contradict the index."""
    # Columns that are not listed here have one number per row.
    widths = {"node_feat": len(NODE_FEATURES), "edge_index": 2, "config_feat": schema.width}
    try:
        index = read_json_input(folder / INDEX, _MAX_INDEX_BYTES)
        names, offsets = _parse_index(index)
        arrays = {}
        for column, (dtype, rows) in COLUMNS.items():
            total = int(offsets[rows][-1])
            shape = (total, widths[column]) if column in widths else (total,)
            arrays[column] = map_array(folder / f"{column}.bin", dtype, shape)
        return Split(names, offsets, arrays, schema)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, UnavailableError) as error:
        raise FileFormatError(
            f"The converted data in {folder} is damaged; remove that folder and run again."
        ) from error


def _parse_index(index: Any) -> tuple[list[str], dict[str, Array]]:
    """Return (kernel names, offsets by array) from a parsed index; an exception means that it is malformed."""
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


def read_folder(root: Path) -> Collection:
    """Read the collection in a folder of npz files, with the deviations and repeats that the files contain."""
    schema = read_schema(root)
    splits: dict[str, list[MeasuredKernel]] = {}
    for split in ("train", "valid", "test"):
        # Large imports write a split as flat files, all others as one file per kernel.
        if (root / split / INDEX).is_file():
            splits[split] = _from_packed(root / split, schema)
        else:
            splits[split] = [_from_file(path, schema) for path in sorted((root / split).glob("*.npz"))]
    if not any(splits.values()):
        raise FileFormatError(f"{root} contains no train, valid or test folder with npz files.")
    return Collection(schema, splits)


def _from_file(path: Path, schema: Schema) -> MeasuredKernel:
    """Read one kernel file, with its arrays of repeats and deviations if it has them."""
    kernel = read_kernel(path, schema.width)
    name_of_key = {f"config_{name}": name for name in NOISE_KEYS}
    noise = {name_of_key[key]: array for key, array in read_npz(path, (), tuple(name_of_key)).items()}
    if any(array.shape != (kernel.n_configs,) for array in noise.values()):
        raise FileFormatError(f"{path}: config_deviation and config_repeats need one number per configuration.")
    return attach_noise(kernel, noise, {})


def _from_packed(folder: Path, schema: Schema) -> list[MeasuredKernel]:
    """Read a split stored as flat files (see `shards`), with its repeats and deviations."""
    split = open_packed(folder, schema)
    offsets = split.offsets("configs")
    noise = {
        name: map_array(folder / f"config_{name}.bin", dtype, (split.n_configs,))
        for name, dtype in (("deviation", "<f4"), ("repeats", "<u2"))
        if (folder / f"config_{name}.bin").is_file()
    }
    return [
        attach_noise(kernel, {name: column[offsets[i] : offsets[i + 1]] for name, column in noise.items()}, {})
        for i, kernel in enumerate(split)
    ]


def track(items: Iterable[Item], label: str, total: int, enabled: bool = True) -> Iterator[Item]:
    """Yield `items` unchanged and report progress on stderr under `label`, out of `total`."""
    if not enabled:
        yield from items
    # A bar redraws its line, which would fill a log file.
    elif sys.stderr.isatty():
        yield from _bar(items, label, total)
    else:
        yield from _with_progress_lines(items, label, total)


def _bar(items: Iterable[Item], label: str, total: int) -> Iterator[Item]:
    """Yield the items, showing a progress bar on standard error."""
    from rich.console import Console
    from rich.progress import track as rich_track

    yield from rich_track(items, description=label, total=total, console=Console(stderr=True), transient=True)


def _with_progress_lines(items: Iterable[Item], label: str, total: int) -> Iterator[Item]:
    """Yield the items, and print a line of progress to stderr every few seconds."""
    start = last_report = time.monotonic()
    for count, item in enumerate(items):
        now = time.monotonic()
        if now - last_report > _SECONDS_BETWEEN_LINES:
            last_report = now
            print(f"{label}: {count} of {total}, {now - start:.0f} s", file=sys.stderr, flush=True)
        yield item
