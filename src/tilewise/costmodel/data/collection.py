"""A whole collection in one small file, which is how the embedded ones travel.

The file is an npz of a dozen plain arrays: each of a kernel's arrays laid end to end over all kernels, columns of small
whole numbers in the smallest type that holds them and transposed (neighbours then repeat, and compression does the
rest), and one JSON text with the names and the schema. Reading goes through the same checks as any kernel file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._files import parse_json, write_whole
from tilewise.costmodel.data.kernel import Kernel, make_kernel, read_kernel
from tilewise.costmodel.data.npz import Array, npz_bytes, read_npz
from tilewise.costmodel.data.schema import Schema, read_schema, schema_from
from tilewise.costmodel.data.shards import INDEX, map_array, open_packed
from tilewise.errors import FileFormatError

FORMAT = 1
_KERNEL_ARRAYS = ("node_feat", "node_opcode", "edge_index", "config_feat", "runtime", "normalizer")
_ROWS = {"node_feat": "nodes", "node_opcode": "nodes", "edge_index": "edges"}
_KEYS = ("index", "nodes", "edges", "configs", *_KERNEL_ARRAYS)
_NOISE = ("deviation", "repeats")


@dataclass(frozen=True, eq=False)
class MeasuredKernel:
    """A kernel and, by configuration, how far its repeated timings scattered and how many there were."""

    kernel: Kernel
    deviation: npt.NDArray[np.float32]  # relative standard deviation of the repeats; NaN for a single timing
    repeats: npt.NDArray[np.uint16]
    problem: Mapping[str, Any]  # the family and its sizes; empty where it is not known


@dataclass(frozen=True, eq=False)
class Collection:
    """Kernels by split, and the schema of their configurations."""

    schema: Schema
    splits: dict[str, list[MeasuredKernel]]


def write_collection(path: Path, collection: Collection) -> int:
    """Write `collection` whole or not at all; gives the bytes written."""
    every = [measured for kernels in collection.splits.values() for measured in kernels]
    kernels = [measured.kernel for measured in every]
    index = {
        "format": FORMAT,
        "schema": {"config_features": list(collection.schema.config_features), **collection.schema.extra},
        "splits": {name: [m.kernel.name for m in members] for name, members in collection.splits.items()},
        "problems": [dict(measured.problem) for measured in every],
    }
    arrays: dict[str, Array] = {
        "index": np.frombuffer(json.dumps(index, separators=(",", ":")).encode(), np.uint8),
        "nodes": np.array([k.n_nodes for k in kernels], np.int32),
        "edges": np.array([len(k.edge_index) for k in kernels], np.int32),
        "configs": np.array([k.n_configs for k in kernels], np.int32),
        "deviation": np.concatenate([m.deviation for m in every]).astype(np.float16),
        "repeats": np.concatenate([m.repeats for m in every]).astype(np.uint16),
    }
    for name in _KERNEL_ARRAYS:
        arrays[name] = _smallest(np.concatenate([getattr(k, name) for k in kernels]).T)
    content = npz_bytes(arrays, level=9)
    write_whole(path, content)
    return len(content)


def _smallest(array: Array) -> Array:
    """The same numbers in the smallest integer type, where they are whole; floats stay as they are."""
    if array.dtype.kind == "f" and (array != np.rint(array)).any():
        return np.ascontiguousarray(array)
    low, high = (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)
    for kind in (np.uint8, np.int16, np.uint16, np.int32):
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return np.ascontiguousarray(array.astype(kind))
    return np.ascontiguousarray(array)


def read_collection(path: Path) -> Collection:
    """The collection in the file `path`; whatever is wrong with it is one sentence."""
    arrays = read_npz(path, _KEYS, _NOISE)
    try:
        index = parse_json(arrays.pop("index").tobytes(), path)
        if index["format"] != FORMAT:
            raise FileFormatError(f"{path} has format {index['format']}; this tilewise reads format {FORMAT}.")
        schema = schema_from(index["schema"], path)
        names = [(split, str(name)) for split, members in index["splits"].items() for name in members]
        cut = _cut(arrays, len(names))
        splits: dict[str, list[MeasuredKernel]] = {split: [] for split in index["splits"]}
        for (split, name), parts, problem in zip(names, cut, index["problems"], strict=True):
            splits[split].append(_measured(name, parts, problem, schema, path))
    except FileFormatError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise FileFormatError(f"{path} is not a collection of tilewise ({type(error).__name__}).") from error
    return Collection(schema, splits)


def read_folder(root: Path) -> Collection:
    """The collection in a folder of npz files; noise is what its files say of it, if they do."""
    schema = read_schema(root)
    splits: dict[str, list[MeasuredKernel]] = {}
    for split in ("train", "valid", "test"):
        if (root / split / INDEX).is_file():
            splits[split] = _from_packed(root / split, schema)
        else:
            splits[split] = [_from_file(path, schema) for path in sorted((root / split).glob("*.npz"))]
    if not any(splits.values()):
        raise FileFormatError(f"{root} holds no train, valid or test folder with npz files.")
    return Collection(schema, splits)


def _from_file(path: Path, schema: Schema) -> MeasuredKernel:
    kernel = read_kernel(path, schema.width)
    noise = {f"config_{name}": name for name in _NOISE}
    parts = {noise[key]: array for key, array in read_npz(path, (), tuple(noise)).items()}
    if any(array.shape != (kernel.n_configs,) for array in parts.values()):
        raise FileFormatError(f"{path}: config_deviation and config_repeats need one number a configuration.")
    return _with_noise(kernel, parts, {})


def _from_packed(folder: Path, schema: Schema) -> list[MeasuredKernel]:
    split = open_packed(folder, schema)
    cuts = split.offsets("configs")
    noise = {
        name: map_array(folder / f"config_{name}.bin", kind, (split.n_configs,))
        for name, kind in (("deviation", "<f4"), ("repeats", "<u2"))
        if (folder / f"config_{name}.bin").is_file()
    }
    return [
        _with_noise(kernel, {name: column[cuts[i] : cuts[i + 1]] for name, column in noise.items()}, {})
        for i, kernel in enumerate(split)
    ]


def _cut(arrays: dict[str, Array], count: int) -> Sequence[dict[str, Array]]:
    """Each kernel's own part of every array."""
    pieces: list[dict[str, Array]] = [{} for _ in range(count)]
    ends = {rows: np.cumsum(_counts(arrays.pop(rows), count)) for rows in ("nodes", "edges", "configs")}
    for name, array in arrays.items():
        stops = ends[_ROWS.get(name, "configs")]
        flat = np.ascontiguousarray(array.T)
        if len(flat) != (stops[-1] if count else 0):
            raise ValueError(name)
        for piece, part in zip(pieces, np.split(flat, stops[:-1]), strict=True):
            piece[name] = part
    return pieces


def _counts(array: Array, count: int) -> npt.NDArray[np.int64]:
    if array.shape != (count,) or array.dtype.kind not in "iu" or (array < 0).any():
        raise ValueError("counts")
    return array.astype(np.int64)


def _measured(name: str, parts: dict[str, Array], problem: Any, schema: Schema, path: Path) -> MeasuredKernel:
    given = [parts[key] for key in _KERNEL_ARRAYS]
    kernel = make_kernel(name, *given, width=schema.width, where=f"{path}: {name}")
    return _with_noise(kernel, parts, problem)


def _with_noise(kernel: Kernel, parts: Mapping[str, Array], problem: Any) -> MeasuredKernel:
    missing = np.full(kernel.n_configs, np.nan, np.float32)
    deviation = parts.get("deviation", missing).astype(np.float32)
    repeats = parts.get("repeats", np.ones(kernel.n_configs)).astype(np.uint16)
    return MeasuredKernel(kernel, deviation, repeats, dict(problem))
