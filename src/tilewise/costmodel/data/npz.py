"""Reads arrays from untrusted npz files.

The reader checks every claim of the file before it acts on it. It limits the size of the zip directory before parsing
it. Before it allocates an array, the member's size, the shape in the npy header and the limit for the whole file must
agree. It decodes only plain numbers, so no pickle is ever loaded. Any exception that a damaged file causes in the
decompressor becomes a `FileFormatError` of one sentence.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from tilewise._files import open_input
from tilewise.errors import FileFormatError, TilewiseError

Array = np.ndarray[Any, np.dtype[Any]]

# Limits for untrusted files.
MAX_FILE_BYTES = 1 << 30
MAX_UNPACKED_BYTES = 256 << 20  # sum over the arrays that are read; TpuGraphs' largest kernels need a tenth of it
_MAX_COMPRESSION_RATIO = 32  # larger files may unpack to more; collections reach 15, zip bombs reach 1000
_MAX_MEMBERS = 256
_MAX_DIRECTORY_BYTES = 1 << 18
_MAX_EMPTY_ROWS = 1 << 20
_MAX_HEADER_BYTES = 4096
_END_RECORD_BYTES = (1 << 16) + 22  # zip's end record of 22 bytes and the longest comment
_COMPRESSION_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_HEADER = re.compile(
    r"\s*\{\s*'descr'\s*:\s*'(?P<descr>[<>|=][a-zA-Z]\d{1,2})'\s*,\s*'fortran_order'\s*:\s*(?P<order>True|False)\s*,"
    r"\s*'shape'\s*:\s*\((?P<shape>[\dL,\s]*)\)\s*,?\s*\}\s*"
)
_DAMAGE_ERRORS = (
    zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, MemoryError, ValueError, ArithmeticError,
    LookupError, AttributeError, TypeError, RuntimeError,  # encrypted members, exotic compression
)  # fmt: skip


def read_npz(
    path: Path, keys: Sequence[str], optional: Sequence[str] = (), max_file_bytes: int = MAX_FILE_BYTES
) -> dict[str, Array]:
    """Read the arrays called `keys`, and any of `optional` that exist, from an untrusted npz file by name."""
    with damage_as_error(path, "npz"), open_input(path, max_file_bytes) as stream, open_zip(stream, path) as archive:
        members = list_members(archive, path)
        # The sizes in the directory are checked before any member is unpacked.
        present = [*keys, *(key for key in optional if key in members)]
        missing_keys = [key for key in keys if key not in members]
        if missing_keys:
            raise FileFormatError(f"{path} lacks {', '.join(missing_keys)}; it needs {', '.join(keys)}.")
        total = sum(members[key].file_size for key in present)
        limit = max(MAX_UNPACKED_BYTES, _MAX_COMPRESSION_RATIO * os.fstat(stream.fileno()).st_size)
        if total > limit:
            raise FileFormatError(f"{path} unpacks to {total} bytes, more than the {limit} allowed.")
        return {key: _read_member(archive, members[key], f"{path}: {key}") for key in present}


@contextlib.contextmanager
def damage_as_error(path: Path, kind: str) -> Iterator[None]:
    """Turn any exception that a damaged file causes in this block into a `FileFormatError`."""
    try:
        yield
    except TilewiseError:
        raise
    except _DAMAGE_ERRORS as error:
        hint = "; fetch it again" if kind == "npz" else ""
        raise FileFormatError(f"{path} is not a readable {kind} file ({type(error).__name__}){hint}.") from error


def open_zip(stream: IO[bytes], path: Path) -> zipfile.ZipFile:
    """Open the archive after checking its end record: `zipfile` parses a directory of any length."""
    stream.seek(0, 2)
    stream.seek(max(0, stream.tell() - _END_RECORD_BYTES))
    ending = stream.read()
    position = ending.rfind(b"PK\5\6")
    if position < 0 or len(ending) < position + 22:
        raise FileFormatError(f"{path} is not an npz file, or it is cut short.")
    entries, directory_bytes = struct.unpack("<HI", ending[position + 10 : position + 16])
    is_zip64 = ending[max(0, position - 20) : position][:4] == b"PK\6\7"  # its counts are stored elsewhere
    if entries > _MAX_MEMBERS or directory_bytes > _MAX_DIRECTORY_BYTES or is_zip64:
        raise FileFormatError(f"{path} contains more than {_MAX_MEMBERS} members; a kernel file has six.")
    stream.seek(0)
    return zipfile.ZipFile(stream)


def list_members(archive: zipfile.ZipFile, path: Path) -> Mapping[str, zipfile.ZipInfo]:
    """Map the names of an archive's arrays to their entries; a repeated name raises `FileFormatError`."""
    infos = archive.infolist()
    if len(infos) > _MAX_MEMBERS:
        raise FileFormatError(f"{path} contains {len(infos)} members; a kernel file has six.")
    members: dict[str, zipfile.ZipInfo] = {}
    for info in infos:
        key = info.filename.removesuffix(".npy")
        if key in members:
            raise FileFormatError(f"{path} contains {key} twice.")
        members[key] = info
    return members


def open_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, where: str) -> IO[bytes]:
    """Open a member of a zip archive; raise `FileFormatError` for compression that npz files do not use."""
    if info.compress_type not in _COMPRESSION_METHODS:
        raise FileFormatError(f"{where} uses a compression method that npz files do not use.")
    return archive.open(info)


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, where: str) -> Array:
    """Read the array in one member of an npz archive, C-contiguous and native-endian; `where` begins errors."""
    with open_member(archive, info, where) as stream:
        dtype, fortran, shape, header_bytes = read_header(stream, where)
        check_size(shape, dtype, header_bytes, info, where)
        # The size in the directory was compared with the limit above, so this allocation is bounded.
        flat = np.empty(math.prod(shape), dtype)
        fill_from(stream, flat.view(np.uint8).data, where)
        check_end(stream, where)
    array = flat.reshape(shape, order="F" if fortran else "C")
    return np.ascontiguousarray(array, dtype=dtype.newbyteorder("="))


def check_size(
    shape: tuple[int, ...], dtype: np.dtype[Any], header_bytes: int, info: zipfile.ZipInfo, where: str
) -> None:
    """Raise `FileFormatError` unless an npy header's shape and dtype account for the member's size in bytes."""
    count = math.prod(shape)
    # An empty array takes no bytes, so its size proves nothing about its other dimensions.
    if not count and math.prod(size for size in shape if size) > _MAX_EMPTY_ROWS:
        raise FileFormatError(f"{where} has shape {shape}: an empty array with too large dimensions.")
    if count * dtype.itemsize != info.file_size - header_bytes:
        raise FileFormatError(f"{where} has shape {shape} in its header but {info.file_size} bytes in the file.")


def check_end(stream: IO[bytes], where: str) -> None:
    if stream.read(1):
        raise FileFormatError(f"{where} is longer than its header says.")


def read_header(stream: IO[bytes], where: str, max_axes: int = 4) -> tuple[np.dtype[Any], bool, tuple[int, ...], int]:
    """Parse an npy header; return dtype, whether the order is column-major, shape, and the header's length."""
    # Magic bytes, major and minor version; the length field has 2 bytes in version 1 and 4 bytes later.
    start = stream.read(8)
    if len(start) < 8 or start[:6] != b"\x93NUMPY" or start[6] not in (1, 2, 3):
        raise FileFormatError(f"{where} is not an npy array.")
    width, code = (2, "<H") if start[6] == 1 else (4, "<I")
    length = int(struct.unpack(code, stream.read(width))[0])
    if length > _MAX_HEADER_BYTES:
        raise FileFormatError(f"{where} has an npy header of {length} bytes; at most {_MAX_HEADER_BYTES} are allowed.")
    match = _HEADER.fullmatch(stream.read(length).decode("utf-8"))
    if match is None:
        raise FileFormatError(f"{where} is not an array of plain numbers.")
    dtype = np.dtype(match["descr"])
    if dtype.kind not in "iufb" or dtype.itemsize > 8:
        raise FileFormatError(f"{where} has type {dtype}; integers or floats are needed.")
    shape = tuple(int(size.strip().rstrip("L")) for size in match["shape"].split(",") if size.strip())
    if len(shape) > max_axes:
        raise FileFormatError(f"{where} has {len(shape)} axes; at most {max_axes} are allowed.")
    return dtype, match["order"] == "True", shape, 8 + width + length


def fill_from(stream: IO[bytes], target: memoryview, where: str) -> None:
    """Fill `target` from the stream; raise `FileFormatError` if the stream ends early."""
    position = 0
    while position < len(target):
        chunk = stream.read(min(1 << 20, len(target) - position))
        if not chunk:
            raise FileFormatError(f"{where} is cut short after {position} of {len(target)} bytes.")
        target[position : position + len(chunk)] = chunk
        position += len(chunk)
