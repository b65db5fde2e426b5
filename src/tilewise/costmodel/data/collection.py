"""Reads and writes a whole collection as one small file, the form in which the embedded collections ship.

The file is an npz with a dozen plain arrays. Each kernel array is concatenated over all kernels, stored in the smallest
integer type that represents it, and transposed so that neighbouring bytes repeat and compress well. A JSON text holds
the names and the schema. Reading applies the same checks as reading a kernel file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._files import parse_json, write_atomic
from tilewise.costmodel.data.kernel import Kernel, make_kernel, read_kernel
from tilewise.costmodel.data.npz import Array, npz_bytes, read_npz
from tilewise.costmodel.data.schema import Schema, read_schema, schema_from
from tilewise.costmodel.data.shards import INDEX, map_array, open_packed
from tilewise.errors import FileFormatError

FORMAT = 1  # version of the file format
_KERNEL_ARRAYS = ("node_feat", "node_opcode", "edge_index", "config_feat", "runtime", "normalizer")
_ROW_KIND = {"node_feat": "nodes", "node_opcode": "nodes", "edge_index": "edges"}  # all others: "configs"
_REQUIRED_KEYS = ("index", "nodes", "edges", "configs", *_KERNEL_ARRAYS)
_NOISE_KEYS = ("deviation", "repeats")


@dataclass(frozen=True, eq=False)
class MeasuredKernel:
    """A kernel and, for each configuration, the number and the deviation of its repeated timings."""

    kernel: Kernel
    deviation: npt.NDArray[np.float32]  # (c,) relative standard deviation of the repeats; NaN for a single timing
    repeats: npt.NDArray[np.uint16]  # (c,)
    problem: Mapping[str, Any]  # the family and its sizes; empty if unknown


@dataclass(frozen=True, eq=False)
class Collection:
    """Kernels by split, and the schema of their configurations."""

    schema: Schema
    splits: dict[str, list[MeasuredKernel]]


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
    for name in _KERNEL_ARRAYS:
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


def read_collection(path: Path) -> Collection:
    """Read the collection in the file `path`; raise `FileFormatError` if the file is damaged in any way."""
    arrays = read_npz(path, _REQUIRED_KEYS, _NOISE_KEYS)
    try:
        index = parse_json(arrays.pop("index").tobytes(), path)
        if index["format"] != FORMAT:
            raise FileFormatError(f"{path} has format {index['format']}; this tilewise reads format {FORMAT}.")
        schema = schema_from(index["schema"], path)
        # Arrays and problems are stored in the order of the splits and of their names.
        names = [(split, str(name)) for split, members in index["splits"].items() for name in members]
        per_kernel = _split_by_kernel(arrays, len(names))
        splits: dict[str, list[MeasuredKernel]] = {split: [] for split in index["splits"]}
        for (split, name), kernel_arrays, problem in zip(names, per_kernel, index["problems"], strict=True):
            splits[split].append(_measured_kernel(name, kernel_arrays, problem, schema, path))
    # The index is untrusted: any type or key may be wrong, so its exceptions are translated below.
    except FileFormatError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise FileFormatError(f"{path} is not a collection of tilewise ({type(error).__name__}).") from error
    return Collection(schema, splits)


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
    """Read one kernel file and, if it has them, its arrays of repeats and deviations."""
    kernel = read_kernel(path, schema.width)
    name_of_key = {f"config_{name}": name for name in _NOISE_KEYS}
    noise = {name_of_key[key]: array for key, array in read_npz(path, (), tuple(name_of_key)).items()}
    if any(array.shape != (kernel.n_configs,) for array in noise.values()):
        raise FileFormatError(f"{path}: config_deviation and config_repeats need one number per configuration.")
    return _with_noise(kernel, noise, {})


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
        _with_noise(kernel, {name: column[offsets[i] : offsets[i + 1]] for name, column in noise.items()}, {})
        for i, kernel in enumerate(split)
    ]


def _split_by_kernel(arrays: dict[str, Array], count: int) -> Sequence[dict[str, Array]]:
    """Cut every concatenated array into the arrays of the `count` kernels.

    The entries "nodes", "edges" and "configs" of `arrays` give the number of rows of each kernel.
    """
    per_kernel: list[dict[str, Array]] = [{} for _ in range(count)]
    ends = {kind: np.cumsum(_row_counts(arrays.pop(kind), count)) for kind in ("nodes", "edges", "configs")}
    for name, array in arrays.items():
        stops = ends[_ROW_KIND.get(name, "configs")]
        flat = np.ascontiguousarray(array.T)  # stored transposed: back to one row per node, edge or configuration
        if len(flat) != (stops[-1] if count else 0):
            raise ValueError(name)
        for kernel_arrays, kernel_rows in zip(per_kernel, np.split(flat, stops[:-1]), strict=True):
            kernel_arrays[name] = kernel_rows
    return per_kernel


def _row_counts(array: Array, count: int) -> npt.NDArray[np.int64]:
    if array.shape != (count,) or array.dtype.kind not in "iu" or (array < 0).any():
        raise ValueError("counts")
    return array.astype(np.int64)


def _measured_kernel(name: str, arrays: dict[str, Array], problem: Any, schema: Schema, path: Path) -> MeasuredKernel:
    kernel_arrays = [arrays[key] for key in _KERNEL_ARRAYS]
    kernel = make_kernel(name, *kernel_arrays, width=schema.width, where=f"{path}: {name}")
    return _with_noise(kernel, arrays, problem)


def _with_noise(kernel: Kernel, noise: Mapping[str, Array], problem: Any) -> MeasuredKernel:
    """Attach deviations and repeats; without them every configuration counts as timed once."""
    unknown = np.full(kernel.n_configs, np.nan, np.float32)
    deviation = noise.get("deviation", unknown).astype(np.float32)
    repeats = noise.get("repeats", np.ones(kernel.n_configs)).astype(np.uint16)
    return MeasuredKernel(kernel, deviation, repeats, dict(problem))
