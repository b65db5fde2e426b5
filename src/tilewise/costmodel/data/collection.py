"""Reads and writes a whole collection as one small file, the form in which the embedded collections ship.

The file is an npz with a dozen plain arrays. Each kernel array is concatenated over all kernels, stored in the smallest
integer type that represents it, and transposed so that neighbouring bytes repeat and compress well. A JSON text holds
the names and the schema. Reading applies the same checks as reading a kernel file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._files import parse_json
from tilewise.costmodel.data.kernel import Kernel, make_kernel
from tilewise.costmodel.data.npz import Array, read_npz
from tilewise.costmodel.data.schema import Schema, schema_from
from tilewise.errors import FileFormatError

FORMAT = 1  # version of the file format
KERNEL_ARRAYS = ("node_feat", "node_opcode", "edge_index", "config_feat", "runtime", "normalizer")
_ROW_KIND = {"node_feat": "nodes", "node_opcode": "nodes", "edge_index": "edges"}  # all others: "configs"
_REQUIRED_KEYS = ("index", "nodes", "edges", "configs", *KERNEL_ARRAYS)
NOISE_KEYS = ("deviation", "repeats")


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


def read_collection(path: Path) -> Collection:
    """Read the collection in the file `path`; raise `FileFormatError` if the file is damaged in any way."""
    arrays = read_npz(path, _REQUIRED_KEYS, NOISE_KEYS)
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


def _split_by_kernel(arrays: dict[str, Array], count: int) -> Sequence[dict[str, Array]]:
    """Split concatenated arrays by kernel: return one dict of arrays for each of the `count` kernels.

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
    """Check that an array has one non-negative integer per kernel; return it as int64."""
    if array.shape != (count,) or array.dtype.kind not in "iu" or (array < 0).any():
        raise ValueError("counts")
    return array.astype(np.int64)


def _measured_kernel(name: str, arrays: dict[str, Array], problem: Any, schema: Schema, path: Path) -> MeasuredKernel:
    """Build a kernel from its stored arrays, with the noise of its measurements if the file has it."""
    kernel_arrays = [arrays[key] for key in KERNEL_ARRAYS]
    kernel = make_kernel(name, *kernel_arrays, width=schema.width, where=f"{path}: {name}")
    return attach_noise(kernel, arrays, problem)


def attach_noise(kernel: Kernel, noise: Mapping[str, Array], problem: Any) -> MeasuredKernel:
    """Add the deviation and number of repeated timings in `noise` to a kernel; without them each was timed once."""
    unknown = np.full(kernel.n_configs, np.nan, np.float32)
    deviation = noise.get("deviation", unknown).astype(np.float32)
    repeats = noise.get("repeats", np.ones(kernel.n_configs)).astype(np.uint16)
    return MeasuredKernel(kernel, deviation, repeats, dict(problem))


def with_noise(collection: Collection) -> Collection:
    """Add the median relative deviation of repeated timings to the schema, unless the schema states it.

    Evaluations derive the noise ceiling from it.
    """
    # A single timing has no deviation (NaN).
    deviations = [m.deviation[m.repeats > 1] for members in collection.splits.values() for m in members]
    finite = np.concatenate([values[np.isfinite(values)] for values in deviations]) if deviations else np.zeros(0)
    if "noise" in collection.schema.extra or not len(finite):
        return collection
    extra = collection.schema.extra | {"noise": float(np.median(finite))}
    return Collection(Schema(collection.schema.config_features, extra), collection.splits)
