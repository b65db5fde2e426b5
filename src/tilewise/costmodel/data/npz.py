"""Reads named arrays from an npz file that nobody vouches for, and writes small ones quickly.

The idea of reading: believe nothing before it is checked. The directory's own size is looked at before it is read; the
member's size in it, the shape in its npy header and a limit for the whole file must all agree before a byte of it is
allocated; only plain numbers are decoded, so there is no path to a pickle; whatever a damaged file provokes in the
decompressor becomes one sentence.
"""

from __future__ import annotations

import contextlib
import functools
import io
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

MAX_FILE_BYTES = 1 << 30
MAX_UNPACKED_BYTES = 256 << 20  # of all arrays that are read; the largest kernels of the public dataset need a tenth
_MAX_RATIO = 32  # large files may unpack to more: collections pack to a fifteenth, bombs to a thousandth
_MAX_MEMBERS = 256
_MAX_DIRECTORY_BYTES = 1 << 18
_MAX_EMPTY_ROWS = 1 << 20
_MAX_HEADER_BYTES = 4096
_NUMBERS_AT_ONCE = 1 << 20
_END_BYTES = (1 << 16) + 22  # the last record and the longest comment
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


_LOCAL, _CENTRAL, _END = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I"), struct.Struct("<4s4H2IH")
_DAY = 0x21  # the first of January 1980, the earliest that a zip can say: equal arrays give equal bytes
_WORTH_PACKING = 512  # bytes
_ONE_WRITER_BYTES = 1 << 30


def npz_bytes(arrays: Mapping[str, Array], level: int = -1) -> bytes:
    """What `numpy.savez_compressed` writes, in a fifth of the time for a kernel's few kilobytes; `level` is zlib's.

    Most of that time goes into zipfile's bookkeeping and into compressing arrays of a few numbers, which stay as they
    are here.
    """
    if sum(array.nbytes for array in arrays.values()) > _ONE_WRITER_BYTES:
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **arrays)
        return buffer.getvalue()
    parts: list[bytes] = []
    directory: list[bytes] = []
    at = 0
    for key, array in arrays.items():
        name = f"{key}.npy".encode()
        whole = _npy_header(array.dtype.str, array.shape) + np.ascontiguousarray(array).tobytes()
        packed = len(whole) >= _WORTH_PACKING
        body = zlib.compress(whole, level, wbits=-zlib.MAX_WBITS) if packed else whole
        told = (20, 0, 8 if packed else 0, 0, _DAY, zlib.crc32(whole), len(body), len(whole), len(name), 0)
        parts += [_LOCAL.pack(b"PK\3\4", *told), name, body]
        directory += [_CENTRAL.pack(b"PK\1\2", 20, *told, 0, 0, 0, 0, at), name]
        at += _LOCAL.size + len(name) + len(body)
    listed = b"".join(directory)
    end = _END.pack(b"PK\5\6", 0, 0, len(arrays), len(arrays), len(listed), at, 0)
    return b"".join([*parts, listed, end])


@functools.lru_cache(4096)
def _npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"
    padded = text + " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded.encode("latin-1")


def read_npz(
    path: Path, keys: Sequence[str], optional: Sequence[str] = (), most_file_bytes: int = MAX_FILE_BYTES
) -> dict[str, Array]:
    """The arrays called `keys` (and those of `optional` that are there), as owned native-endian arrays."""
    with _readable(path, "npz"), open_input(path, most_file_bytes) as stream, _opened(stream, path) as archive:
        members = _members(archive, path)
        wanted = [*keys, *(key for key in optional if key in members)]
        missing = [key for key in keys if key not in members]
        if missing:
            raise FileFormatError(f"{path} lacks {', '.join(missing)}; it needs {', '.join(keys)}.")
        total = sum(members[key].file_size for key in wanted)
        most = max(MAX_UNPACKED_BYTES, _MAX_RATIO * os.fstat(stream.fileno()).st_size)
        if total > most:
            raise FileFormatError(f"{path} unpacks to {total} bytes, more than the {most} allowed.")
        return {key: _read_member(archive, members[key], f"{path}: {key}") for key in wanted}


def stream_npz(path: Path, key: str, shape: tuple[int, ...], most_file_bytes: int = MAX_FILE_BYTES) -> Iterator[Array]:
    """The numbers of one array of that shape in C order, some MiB at a time: for what may be larger than memory."""
    where, left = f"{path}: {key}", math.prod(shape)
    with contextlib.ExitStack() as stack:
        with _readable(path, "npz"):
            archive = stack.enter_context(_opened(stack.enter_context(open_input(path, most_file_bytes)), path))
            info = _members(archive, path).get(key)
            if info is None:
                raise FileFormatError(f"{path} lacks {key}.")
            stream = stack.enter_context(_open_member(archive, info, where))
            dtype, fortran, found, header_bytes = _read_header(stream, where)
            if found != shape or fortran:
                order = ", column by column," if fortran else ""
                raise FileFormatError(f"{where} has shape {found}{order} where {shape} is needed.")
            _check_size(found, dtype, header_bytes, info, where)
        while left:  # what happens to a piece is the caller's business: only the reading is guarded
            piece = np.empty(min(left, _NUMBERS_AT_ONCE), dtype)
            with _readable(path, "npz"):
                _fill(stream, piece.view(np.uint8).data, where)
            left -= len(piece)
            yield piece
        with _readable(path, "npz"):
            _check_end(stream, where)


def read_npy(path: Path, most_bytes: int) -> Array:
    """The array of one npy file."""
    with _readable(path, "npy"), open_input(path, most_bytes) as stream:
        dtype, fortran, shape, header_bytes = _read_header(stream, str(path), most_axes=8)
        count, held = math.prod(shape), os.fstat(stream.fileno()).st_size - header_bytes
        if count * dtype.itemsize != held or max(shape, default=0) > most_bytes:
            raise FileFormatError(f"{path} has shape {shape} in its header and {held} bytes of numbers.")
        flat = np.empty(count, dtype)
        _fill(stream, flat.view(np.uint8).data, str(path))
    return np.ascontiguousarray(flat.reshape(shape, order="F" if fortran else "C"), dtype=dtype.newbyteorder("="))


@contextlib.contextmanager
def _readable(path: Path, kind: str) -> Iterator[None]:
    """Whatever a damaged file provokes in this block becomes one sentence."""
    try:
        yield
    except TilewiseError:
        raise
    except _DAMAGE as error:
        again = "; fetch it again" if kind == "npz" else ""
        raise FileFormatError(f"{path} is not a readable {kind} file ({type(error).__name__}){again}.") from error


def _opened(stream: IO[bytes], path: Path) -> zipfile.ZipFile:
    """The archive, once its last record says that its directory is small: reading a million entries takes long."""
    stream.seek(0, 2)
    stream.seek(max(0, stream.tell() - _END_BYTES))
    tail = stream.read()
    at = tail.rfind(b"PK\5\6")
    if at < 0 or len(tail) < at + 22:
        raise FileFormatError(f"{path} is not an npz file, or it is cut short.")
    entries, directory = struct.unpack("<HI", tail[at + 10 : at + 16])
    if entries > _MAX_MEMBERS or directory > _MAX_DIRECTORY_BYTES or tail[max(0, at - 20) : at][:4] == b"PK\6\7":
        raise FileFormatError(f"{path} holds more than {_MAX_MEMBERS} members; a kernel file has six.")
    stream.seek(0)
    return zipfile.ZipFile(stream)


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


def _open_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, where: str) -> IO[bytes]:
    if info.compress_type not in _METHODS:
        raise FileFormatError(f"{where} is compressed in a way npz does not use.")
    return archive.open(info)


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, where: str) -> Array:
    with _open_member(archive, info, where) as stream:
        dtype, fortran, shape, header_bytes = _read_header(stream, where)
        _check_size(shape, dtype, header_bytes, info, where)
        flat = np.empty(math.prod(shape), dtype)
        _fill(stream, flat.view(np.uint8).data, where)
        _check_end(stream, where)
    array = flat.reshape(shape, order="F" if fortran else "C")
    return np.ascontiguousarray(array, dtype=dtype.newbyteorder("="))


def _check_size(
    shape: tuple[int, ...], dtype: np.dtype[Any], header_bytes: int, info: zipfile.ZipInfo, where: str
) -> None:
    count = math.prod(shape)
    if not count and math.prod(size for size in shape if size) > _MAX_EMPTY_ROWS:
        raise FileFormatError(f"{where} has shape {shape}, which holds nothing and is too large.")
    if count * dtype.itemsize != info.file_size - header_bytes:
        raise FileFormatError(f"{where} has shape {shape} in its header but {info.file_size} bytes in the file.")


def _check_end(stream: IO[bytes], where: str) -> None:
    if stream.read(1):
        raise FileFormatError(f"{where} is longer than it says.")


def _read_header(stream: IO[bytes], where: str, most_axes: int = 4) -> tuple[np.dtype[Any], bool, tuple[int, ...], int]:
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
    if len(shape) > most_axes:
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
