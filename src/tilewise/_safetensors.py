"""Read safetensors files: eight bytes of length, a JSON header, then the data.

The reader trusts nothing: the header's length, every name, dtype, shape and offset is checked against the size of the
file before memory is allocated, so a header that claims 2^60 elements is an error, not a crash. Nothing is unpickled.
A file whose data does not match the checksum in its metadata is rejected.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from tilewise._files import convert_read_errors, open_input
from tilewise.errors import FileFormatError

Array = npt.NDArray[Any]

DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",  # widened to float32 when read
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "|u1",
    "BOOL": "|b1",
}


# Limits on input files. They bound the memory that a hostile file can claim; no known model comes close to them.
_MAX_BYTES = 1 << 36
_MAX_HEADER_BYTES = 16 << 20
_MAX_TENSORS = 50_000
_MAX_DIMENSIONS = 64  # NumPy's limit
_MAX_EMPTY_SIZE = 1 << 20  # product of the non-zero dimensions of a tensor without elements
CHECKSUM = "sha256"


def byte_view(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def digest_of(arrays: Iterable[Array]) -> str:
    """SHA-256 of the data of all arrays, in order."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(byte_view(array))
    return digest.hexdigest()


def load_arrays(path: str | os.PathLike[str]) -> tuple[dict[str, Array], dict[str, str]]:
    """Read the arrays and the metadata of a safetensors file."""
    where = Path(path)
    with open_input(where, _MAX_BYTES) as stream, convert_read_errors(where):
        entries, start, size = _read_header(stream, where)
        metadata = _checked_metadata(entries.pop("__metadata__", {}), where)
        layout = {name: _checked_entry(name, entry, size - start, where) for name, entry in entries.items()}
        names = _names_by_offset(layout, size - start, where)
        arrays = {name: _read_array(stream, start, layout[name], where) for name in names}
    expected = metadata.pop(CHECKSUM, None)
    if expected is not None and digest_of(arrays.values()) != expected:
        raise FileFormatError(f"{where} is damaged: its data does not match its checksum")
    return {name: _from_bfloat16(arrays[name], entry[0]) for name, entry in layout.items()}, metadata


def _read_header(stream: IO[bytes], where: Path) -> tuple[dict[str, Any], int, int]:
    """Read the header; return its entries, the offset of the data and the size of the file."""
    size = os.fstat(stream.fileno()).st_size
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
        raise FileFormatError(f"{where} is not a safetensors file, or it is truncated: its header is incomplete")
    header = stream.read(length)
    # Count before parsing: the parsed header takes ten times the memory of its text.
    if header.count(b'"data_offsets"') > _MAX_TENSORS:
        raise FileFormatError(f"{where} has a header that is not a table of at most {_MAX_TENSORS} tensors")
    try:
        entries = json.loads(header.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError, ValueError) as error:
        reason = str(error) if isinstance(error, FileFormatError) else "it is not JSON"
        raise FileFormatError(f"{where} has an invalid header: {reason}") from None
    if not isinstance(entries, dict) or len(entries) > _MAX_TENSORS:
        raise FileFormatError(f"{where} has a header that is not a table of at most {_MAX_TENSORS} tensors")
    return entries, 8 + length, size


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict from the pairs of a JSON object; raise `FileFormatError` if a name occurs twice."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise FileFormatError("a name occurs twice")
    return table


def _checked_metadata(metadata: Any, where: Path) -> dict[str, str]:
    """Return the metadata of a safetensors header if it maps strings to strings; raise `FileFormatError` otherwise."""
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FileFormatError(f"{where} has metadata that is not a table of strings")
    return metadata


def _checked_entry(name: str, entry: Any, body: int, where: Path) -> tuple[str, tuple[int, ...], int, int]:
    """Check one entry against itself and the size of the data; return (dtype, shape, begin, end)."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise FileFormatError(f"{where}: {name!r} does not have exactly a dtype, a shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FileFormatError(f"{where}: {name!r} has the unknown dtype {dtype!r}")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS or not _are_sizes(offsets) or len(offsets) != 2:
        raise FileFormatError(f"{where}: {name!r} has a shape or offsets that are not non-negative integers")
    begin, end = offsets
    if not begin <= end <= body:
        raise FileFormatError(f"{where}: {name!r} is outside the file, which is truncated or damaged")
    if math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize != end - begin:
        raise FileFormatError(f"{where}: {name!r} of shape {shape} and {dtype} does not fill its {end - begin} bytes")
    if is_huge_but_empty(shape):
        raise FileFormatError(f"{where}: {name!r} of shape {shape} has no elements, and too large other dimensions")
    return dtype, tuple(shape), begin, end


def is_huge_but_empty(shape: Sequence[int]) -> bool:
    """True for a tensor without elements whose other dimensions are huge; code that loops over rows would hang."""
    return 0 in shape and math.prod(size for size in shape if size) > _MAX_EMPTY_SIZE


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in values)


def _names_by_offset(layout: Mapping[str, tuple[str, tuple[int, ...], int, int]], body: int, where: Path) -> list[str]:
    """Sort the tensors by offset and check that they fill the file without overlaps or gaps, as the format demands."""
    position = 0
    ordered = sorted(layout.items(), key=lambda item: item[1][2:])
    for name, (_, _, begin, end) in ordered:
        if begin != position:
            raise FileFormatError(
                f"{where}: {name!r} {'overlaps' if begin < position else 'leaves a gap after'} another tensor"
            )
        position = end
    if position != body:
        raise FileFormatError(f"{where} has {body - position} bytes that belong to no tensor")
    return [name for name, _ in ordered]


def _read_array(stream: IO[bytes], start: int, entry: tuple[str, tuple[int, ...], int, int], where: Path) -> Array:
    """Read one array; `entry` is (dtype, shape, first byte, end), in bytes after `start`, where the data begin."""
    dtype, shape, begin, end = entry
    count = (end - begin) // np.dtype(DTYPES[dtype]).itemsize
    stream.seek(start + begin)
    flat = np.fromfile(stream, DTYPES[dtype], count)
    if len(flat) != count:
        raise FileFormatError(f"{where} was truncated while it was read")
    return flat.reshape(shape)


def _from_bfloat16(array: Array, dtype: str) -> Array:
    """Convert bfloat16, which NumPy lacks, to float32 by appending 16 zero bits; return other dtypes unchanged."""
    return np.asarray(array.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else array
