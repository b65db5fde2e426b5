"""Tensors on disk in the safetensors format: eight bytes of length, a JSON header, then the numbers.

The reader trusts nothing: the header's length, every name, dtype, shape and offset is checked against the size of the
file before a byte is allocated, so a header that claims 2^60 elements costs one sentence. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from tilewise._files import replacing
from tilewise.errors import DtypeError, FileFormatError, UnavailableError
from tilewise.nn.module import Module
from tilewise.tensor import Tensor

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
_NAMES = {np.dtype(code): name for name, code in DTYPES.items() if name != "BF16"}
_MOST_HEADER_BYTES = 100_000_000  # the limit of the format's own library
_MOST_DIMENSIONS = 64


def save(
    tensors: Mapping[str, Any] | Module, path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write named tensors (or a module's state) as one safetensors file, which appears whole or not at all.

    >>> save({"weight": Tensor([1.0, 2.0])}, "/tmp/weights.safetensors")
    >>> load("/tmp/weights.safetensors")["weight"]
    Tensor([1., 2.])
    """
    source = tensors.state_dict() if isinstance(tensors, Module) else tensors
    # little-endian, in C order
    arrays = {name: np.asarray(value, order="C") for name, value in source.items()}
    arrays = {name: a.astype(a.dtype.newbyteorder("<"), copy=False) for name, a in arrays.items()}
    header = _header(arrays, metadata)
    with replacing(Path(path)) as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for array in arrays.values():
            stream.write(array.reshape(-1).view(np.uint8).data)


def _header(arrays: Mapping[str, Array], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, array in arrays.items():
        if array.dtype not in _NAMES or name == "__metadata__":
            raise DtypeError(f"{name} of {array.dtype} cannot be saved in the safetensors format")
        begin, end = end, end + array.nbytes
        entries[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def load(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read every tensor of a safetensors file, by name."""
    return {name: Tensor(array) for name, array in load_arrays(path)[0].items()}


def load_arrays(path: str | os.PathLike[str]) -> tuple[dict[str, Array], dict[str, str]]:
    """The arrays of a safetensors file, and its metadata."""
    where = Path(path)
    try:
        with where.open("rb") as stream:
            entries, start, size = _read_header(stream, where)
            metadata = _checked_metadata(entries.pop("__metadata__", {}), where)
            layout = {name: _checked_entry(name, entry, size - start, where) for name, entry in entries.items()}
            _check_cover(layout, size - start, where)
            return {name: _read_array(stream, start, *found) for name, found in layout.items()}, metadata
    except OSError as error:
        raise UnavailableError(f"{where} cannot be read: {error.strerror}") from None


def _read_header(stream: IO[bytes], where: Path) -> tuple[dict[str, Any], int, int]:
    size = os.fstat(stream.fileno()).st_size
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > min(_MOST_HEADER_BYTES, size - 8):
        raise FileFormatError(f"{where} is not a safetensors file, or it is cut short: its header does not fit into it")
    try:
        entries = json.loads(stream.read(length).decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError, ValueError) as error:
        why = str(error) if isinstance(error, FileFormatError) else "it is not JSON"
        raise FileFormatError(f"{where} has a broken header: {why}") from None
    if not isinstance(entries, dict):
        raise FileFormatError(f"{where} has a header that is not a table of tensors")
    return entries, 8 + length, size


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise FileFormatError("a name comes twice")
    return table


def _checked_metadata(metadata: Any, where: Path) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FileFormatError(f"{where} has metadata that is not a table of strings")
    return metadata


def _checked_entry(name: str, entry: Any, body: int, where: Path) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, begin, end) of one tensor, all consistent with each other and with the size of the file."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise FileFormatError(f"{where}: {name!r} does not have exactly a dtype, a shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FileFormatError(f"{where}: {name!r} has the unknown dtype {dtype!r}")
    if not _are_sizes(shape) or len(shape) > _MOST_DIMENSIONS or not _are_sizes(offsets) or len(offsets) != 2:
        raise FileFormatError(f"{where}: {name!r} has a shape or offsets that are not non-negative integers")
    begin, end = offsets
    if not begin <= end <= body:
        raise FileFormatError(f"{where}: {name!r} lies outside the file, which is cut short or damaged")
    if math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize != end - begin:
        raise FileFormatError(f"{where}: {name!r} of shape {shape} and {dtype} does not fill its {end - begin} bytes")
    return dtype, tuple(shape), begin, end


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in values)


def _check_cover(layout: Mapping[str, tuple[str, tuple[int, ...], int, int]], body: int, where: Path) -> None:
    """The tensors must fill the file one after the other, as the format demands: no overlap, no gap, no tail."""
    at = 0
    for name, (_, _, begin, end) in sorted(layout.items(), key=lambda item: item[1][2:]):
        if begin != at:
            raise FileFormatError(
                f"{where}: {name!r} {'overlaps' if begin < at else 'leaves a gap after'} another tensor"
            )
        at = end
    if at != body:
        raise FileFormatError(f"{where} has {body - at} bytes that belong to no tensor")


def _read_array(stream: IO[bytes], start: int, dtype: str, shape: tuple[int, ...], begin: int, end: int) -> Array:
    stream.seek(start + begin)
    array = np.fromfile(stream, DTYPES[dtype], (end - begin) // np.dtype(DTYPES[dtype]).itemsize).reshape(shape)
    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array
