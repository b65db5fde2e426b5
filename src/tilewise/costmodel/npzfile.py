"""Reads named arrays from an npz file that nobody vouches for.

The idea: believe nothing before it is checked. The member's size in the zip directory, the shape in its npy header and
a fixed limit must all agree before a byte of the array is allocated; only plain numbers are decoded, so there is no
path to a pickle; whatever a damaged file provokes in the decompressor becomes one sentence.
"""

from __future__ import annotations

import math
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from tilewise.errors import FileFormatError

Array = np.ndarray[Any, np.dtype[Any]]

MAX_ARRAY_BYTES = 1 << 30
_MAX_MEMBERS = 256
_MAX_HEADER_BYTES = 4096
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_HEADER = re.compile(
    r"\s*\{\s*'descr'\s*:\s*'(?P<descr>[<>|=][a-zA-Z]\d{1,2})'\s*,\s*'fortran_order'\s*:\s*(?P<order>True|False)\s*,"
    r"\s*'shape'\s*:\s*\((?P<shape>[\dL,\s]*)\)\s*,?\s*\}\s*"
)
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    OSError,
    EOFError,
    ValueError,
    OverflowError,
    RuntimeError,  # encrypted members, and NotImplementedError for exotic compression
    KeyError,
    IndexError,
    AttributeError,
    TypeError,
    MemoryError,
)


def read_npz(path: Path, keys: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Array]:
    """The arrays called `keys` (and those of `optional` that are there), as owned native-endian arrays."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = _members(archive, path)
            wanted = [*keys, *(key for key in optional if key in members)]
            missing = [key for key in keys if key not in members]
            if missing:
                raise FileFormatError(f"{path} lacks {', '.join(missing)}; a kernel file needs {', '.join(keys)}.")
            return {key: _read_member(archive, members[key], f"{path}: {key}") for key in wanted}
    except FileFormatError:
        raise
    except FileNotFoundError as error:
        raise FileFormatError(f"{path} does not exist.") from error
    except _DAMAGE as error:
        raise FileFormatError(f"{path} is not a readable npz file ({type(error).__name__}); fetch it again.") from error


def _members(archive: zipfile.ZipFile, path: Path) -> Mapping[str, zipfile.ZipInfo]:
    infos = archive.infolist()
    if len(infos) > _MAX_MEMBERS:
        raise FileFormatError(f"{path} holds {len(infos)} members; a kernel file has six.")
    found: dict[str, zipfile.ZipInfo] = {}
    for info in infos:
        key = info.filename.removesuffix(".npy")
        if key in found:
            raise FileFormatError(f"{path} holds {key} twice.")
        found[key] = info
    return found


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, where: str) -> Array:
    if info.compress_type not in _METHODS:
        raise FileFormatError(f"{where} is compressed in a way npz does not use.")
    if info.file_size > MAX_ARRAY_BYTES:
        raise FileFormatError(f"{where} unpacks to {info.file_size} bytes, more than the {MAX_ARRAY_BYTES} allowed.")
    with archive.open(info) as stream:
        dtype, fortran, shape, header_bytes = _read_header(stream, where)
        count = math.prod(shape)
        if count * dtype.itemsize != info.file_size - header_bytes:
            raise FileFormatError(f"{where} has shape {shape} in its header but {info.file_size} bytes in the file.")
        flat = np.empty(count, dtype)
        _fill(stream, flat.view(np.uint8).data, where)
        if stream.read(1):
            raise FileFormatError(f"{where} is longer than it says.")
    array = flat.reshape(shape, order="F" if fortran else "C")
    return np.ascontiguousarray(array, dtype=dtype.newbyteorder("="))


def _read_header(stream: IO[bytes], where: str) -> tuple[np.dtype[Any], bool, tuple[int, ...], int]:
    start = stream.read(8)
    if len(start) < 8 or start[:6] != b"\x93NUMPY" or start[6] not in (1, 2, 3):
        raise FileFormatError(f"{where} is not an npy array.")
    width, code = (2, "<H") if start[6] == 1 else (4, "<I")
    length = int(struct.unpack(code, stream.read(width))[0])
    if length > _MAX_HEADER_BYTES:
        raise FileFormatError(f"{where} has an npy header of {length} bytes; one of six plain arrays is far shorter.")
    match = _HEADER.fullmatch(stream.read(length).decode("utf-8"))
    if match is None:
        raise FileFormatError(f"{where} is not an array of plain numbers.")
    dtype = np.dtype(match["descr"])
    if dtype.kind not in "iufb" or dtype.itemsize > 8:
        raise FileFormatError(f"{where} has type {dtype}; integers or floats are needed.")
    shape = tuple(int(part.strip().rstrip("L")) for part in match["shape"].split(",") if part.strip())
    if len(shape) > 4:
        raise FileFormatError(f"{where} has {len(shape)} axes.")
    return dtype, match["order"] == "True", shape, 8 + width + length


def _fill(stream: IO[bytes], target: memoryview, where: str) -> None:
    done = 0
    while done < len(target):
        piece = stream.read(min(1 << 20, len(target) - done))
        if not piece:
            raise FileFormatError(f"{where} is cut short after {done} of {len(target)} bytes.")
        target[done : done + len(piece)] = piece
        done += len(piece)
