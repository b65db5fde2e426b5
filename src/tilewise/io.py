"""Tensors on disk in the safetensors format: eight bytes of length, a JSON header, then the numbers.

The reader trusts nothing: the header's length, every name, dtype, shape and offset is checked against the size of the
file before a byte is allocated, so a header that claims 2^60 elements costs one sentence. Nothing is ever unpickled.

What is written carries the SHA-256 of its numbers in the header's metadata, which readers of the format pass over; a
file that has one and whose numbers give another was damaged on its way, and is refused.
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

from tilewise._files import open_input, reading, replacing
from tilewise.errors import DtypeError, FileFormatError, ShapeError
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
_MOST_BYTES = 1 << 36
_MOST_HEADER_BYTES = 16 << 20
_MOST_TENSORS = 50_000  # a network of a thousand layers has some ten thousand
_MOST_DIMENSIONS = 64
_MOST_EMPTY = 1 << 20  # rows that a tensor without a number in it may claim to have
_CHECKSUM = "sha256"


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
    header = _header(arrays, {**(metadata or {}), _CHECKSUM: _digest(arrays.values())})
    with replacing(Path(path)) as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for array in arrays.values():
            stream.write(_bytes(array))


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _digest(arrays: Iterable[Array]) -> str:
    """The SHA-256 of all numbers, one array after the other."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(_bytes(array))
    return digest.hexdigest()


def _header(arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, array in arrays.items():
        if array.dtype not in _NAMES or name == "__metadata__":
            raise DtypeError(f"{name} of {array.dtype} cannot be saved in the safetensors format")
        if _absurd(array.shape):
            raise ShapeError(f"{name} of shape {array.shape} holds nothing, and is too large to be saved")
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
    with open_input(where, _MOST_BYTES) as stream, reading(where):
        entries, start, size = _read_header(stream, where)
        metadata = _checked_metadata(entries.pop("__metadata__", {}), where)
        layout = {name: _checked_entry(name, entry, size - start, where) for name, entry in entries.items()}
        in_file = _in_order_of_the_file(layout, size - start, where)
        arrays = {name: _read_array(stream, start, layout[name], where) for name in in_file}
    expected = metadata.pop(_CHECKSUM, None)
    if expected is not None and _digest(arrays.values()) != expected:
        raise FileFormatError(f"{where} is damaged: its numbers are not those its checksum was made of")
    return {name: _widened(arrays[name], found[0]) for name, found in layout.items()}, metadata


def _read_header(stream: IO[bytes], where: Path) -> tuple[dict[str, Any], int, int]:
    size = os.fstat(stream.fileno()).st_size
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > min(_MOST_HEADER_BYTES, size - 8):
        raise FileFormatError(f"{where} is not a safetensors file, or it is cut short: its header does not fit into it")
    header = stream.read(length)
    if (
        header.count(b'"data_offsets"') > _MOST_TENSORS
    ):  # before it is parsed: a table of names takes ten times its bytes
        raise FileFormatError(f"{where} has a header that is not a table of at most {_MOST_TENSORS} tensors")
    try:
        entries = json.loads(header.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError, ValueError) as error:
        why = str(error) if isinstance(error, FileFormatError) else "it is not JSON"
        raise FileFormatError(f"{where} has a broken header: {why}") from None
    if not isinstance(entries, dict) or len(entries) > _MOST_TENSORS:
        raise FileFormatError(f"{where} has a header that is not a table of at most {_MOST_TENSORS} tensors")
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
    if _absurd(shape):
        raise FileFormatError(f"{where}: {name!r} of shape {shape} holds nothing, and is too large")
    return dtype, tuple(shape), begin, end


def _absurd(shape: Sequence[int]) -> bool:
    """Whether a tensor with nothing in it claims so many rows that a reader who makes room for each would suffer."""
    return 0 in shape and math.prod(size for size in shape if size) > _MOST_EMPTY


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in values)


def _in_order_of_the_file(
    layout: Mapping[str, tuple[str, tuple[int, ...], int, int]], body: int, where: Path
) -> list[str]:
    """The tensors must fill the file one after the other, as the format demands: no overlap, no gap, no tail."""
    at = 0
    ordered = sorted(layout.items(), key=lambda item: item[1][2:])
    for name, (_, _, begin, end) in ordered:
        if begin != at:
            raise FileFormatError(
                f"{where}: {name!r} {'overlaps' if begin < at else 'leaves a gap after'} another tensor"
            )
        at = end
    if at != body:
        raise FileFormatError(f"{where} has {body - at} bytes that belong to no tensor")
    return [name for name, _ in ordered]


def _read_array(stream: IO[bytes], start: int, found: tuple[str, tuple[int, ...], int, int], where: Path) -> Array:
    dtype, shape, begin, end = found
    count = (end - begin) // np.dtype(DTYPES[dtype]).itemsize
    stream.seek(start + begin)
    flat = np.fromfile(stream, DTYPES[dtype], count)
    if len(flat) != count:
        raise FileFormatError(f"{where} was cut short while it was read")
    return flat.reshape(shape)


def _widened(array: Array, dtype: str) -> Array:
    return np.asarray(array.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else array
