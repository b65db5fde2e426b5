"""Writes measured kernels: npz files of TpuGraphs' format, a whole collection as one file, a split as flat files.

All of them are read back by `npz`, `collection` and `shards`.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from array import array as array_of
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np

from tilewise._atomic import write_atomic
from tilewise.costmodel.data.collection import FORMAT, KERNEL_ARRAYS, Collection
from tilewise.costmodel.data.dataset import COLUMNS, INDEX
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.npz import Array

_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest date of a zip: equal arrays give equal bytes


def npz_bytes(arrays: Mapping[str, Array], level: int | None = None) -> bytes:
    """Encode arrays as a compressed npz file; `level` is zlib's, 0 to 9."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for key, array in arrays.items():
            npy = io.BytesIO()
            np.lib.format.write_array(npy, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
            info = zipfile.ZipInfo(f"{key}.npy", _ZIP_EPOCH)
            archive.writestr(info, npy.getbuffer(), zipfile.ZIP_DEFLATED, level)
    return buffer.getvalue()


def kernel_npz(kernel: Kernel, **extra_arrays: Array) -> bytes:
    """Encode a kernel as an npz file with the six arrays and dtypes of TpuGraphs, plus `extra_arrays`."""
    arrays: dict[str, Array] = {
        "node_feat": kernel.node_feat,
        "node_opcode": kernel.node_opcode,
        "edge_index": kernel.edge_index.astype(np.int64),
        "config_feat": kernel.config_feat,
        "config_runtime": kernel.runtime,
        "config_runtime_normalizers": kernel.normalizer,
    }
    return npz_bytes(arrays | extra_arrays)


def write_collection(path: Path, collection: Collection) -> int:
    """Write `collection` atomically and return the number of bytes."""
    members = [member for split in collection.splits.values() for member in split]
    kernels = [member.kernel for member in members]
    # Everything that is not an array goes into one JSON text, stored as an array of bytes.
    index = {
        "format": FORMAT,
        "schema": {"config_features": list(collection.schema.config_features), **collection.schema.extra},
        "splits": {name: [m.kernel.name for m in split] for name, split in collection.splits.items()},
        "problems": [dict(member.problem) for member in members],
    }
    arrays: dict[str, Array] = {
        "index": np.frombuffer(json.dumps(index, separators=(",", ":")).encode(), np.uint8),
        "nodes": np.array([k.n_nodes for k in kernels], np.int32),
        "edges": np.array([len(k.edge_index) for k in kernels], np.int32),
        "configs": np.array([k.n_configs for k in kernels], np.int32),
        "deviation": np.concatenate([m.deviation for m in members]).astype(np.float16),
        "repeats": np.concatenate([m.repeats for m in members]).astype(np.uint16),
    }
    # Transposed, the values of one column are neighbours, which compresses better.
    for name in KERNEL_ARRAYS:
        arrays[name] = _to_smallest_dtype(np.concatenate([getattr(k, name) for k in kernels]).T)
    content = npz_bytes(arrays, level=9)
    write_atomic(path, content)
    return len(content)


def _to_smallest_dtype(array: Array) -> Array:
    """Convert whole numbers to the smallest integer type that represents them; other floats stay unchanged."""
    if array.dtype.kind == "f" and (array != np.rint(array)).any():
        return np.ascontiguousarray(array)
    # float64 represents every value of the integer types below exactly.
    low, high = (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)
    for dtype in (np.uint8, np.int16, np.uint16, np.int32):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return np.ascontiguousarray(array.astype(dtype))
    return np.ascontiguousarray(array)


class SplitWriter:
    """Context manager that writes a split kernel by kernel; the index is written when the block ends without error.

    Each of the `extra_arrays` of `add` goes to its own file, `NAME.bin`; the index records its length per kernel.
    """

    def __init__(self, folder: Path) -> None:
        """Prepare to write a split's flat files to `folder`."""
        self._folder = folder
        self._streams: dict[str, IO[bytes]] = {}
        self._names: list[str] = []
        self._counts = {rows: array_of("q") for rows in ("nodes", "edges", "configs")}
        self._columns = [(column, np.dtype(dtype), self._stream(column)) for column, (dtype, _) in COLUMNS.items()]

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
        """Append a kernel to the split's flat files, with further arrays by name."""
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
        """Return the open output file of the array `name`; it is created at first use."""
        if name not in self._streams:
            self._streams[name] = (self._folder / f"{name}.bin").open("wb", buffering=1 << 20)
        return self._streams[name]
