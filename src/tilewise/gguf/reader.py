"""Read a GGUF file: its metadata, and the location of each tensor.

Nothing in the file is trusted: counts and lengths are compared with the remaining bytes, tensors with the end of the
file, names with earlier names. An inconsistent file gives an error in one sentence, and parsing takes only a few times
the memory of the metadata. Tensors are views of the mapped file: nothing is read before it is used. The mapping is
private, so that an array may be changed without changing the file.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np

from tilewise._files import convert_read_errors, open_input
from tilewise.errors import FileFormatError
from tilewise.gguf.tensors import KINDS, TensorKind
from tilewise.tensor import Array

Path = str | os.PathLike[str]
# Limits on input files, far above those of any model.
_MAX_BYTES = 1 << 40
_MAX_METADATA_BYTES = 1 << 28
_MAX_KEYS, _MAX_TENSORS, _MAX_NAME_BYTES = 1 << 16, 1 << 17, 1 << 10
_MAX_DIMENSIONS = 4  # of the format
# Type codes of the format.
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """Format, shape (in NumPy's order, rows first) and location of a tensor in the file."""

    name: str
    kind: TensorKind
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """A parsed file; `metadata` values are numbers, bools, strings, arrays or lists of strings."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo] = field(repr=False)
    mapping: mmap.mmap = field(repr=False)

    def read(self, name: str) -> Array:
        """Return the stored bytes of a tensor, (blocks, bytes per block), as a view of the mapped file."""
        info = self.tensors[name]
        raw = np.frombuffer(self.mapping, np.uint8, info.nbytes, info.offset)
        # Hostile files may align their tensors to single bytes.
        aligned = raw if info.kind.block > 1 or raw.ctypes.data % info.kind.block_bytes == 0 else raw.copy()
        return aligned.reshape(-1, info.kind.block_bytes)

    def release(self, name: str) -> None:
        """Drop a tensor that was copied from this process's resident memory; it can still be read."""
        info = self.tensors[name]
        first = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (info.offset + info.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            with contextlib.suppress(OSError):
                self.mapping.madvise(mmap.MADV_DONTNEED, first, length)

    def floats(self, name: str) -> Array:
        """Return a tensor as float32; an F32 matrix is a view of the file, whose numbers are not checked."""
        info = self.tensors[name]
        with np.errstate(all="ignore"):  # NaN and infinity are rejected below
            values = info.kind.to_floats(self.read(name)).reshape(info.shape)
        if values.ndim == 1 and not np.isfinite(values).all():
            raise FileFormatError(f"{self.path} is not a usable model: {name!r} contains NaN or infinity.")
        return values


def read_gguf(path: Path) -> GGUFFile:
    """Read the metadata and the tensor locations of a GGUF file (version 2 or 3, little-endian)."""
    with open_input(path, _MAX_BYTES) as stream, convert_read_errors(path):
        size = os.fstat(stream.fileno()).st_size
        if size < 24:
            raise FileFormatError(f"{path} is not a GGUF file.")
        return _Parser(stream, path, mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_COPY)).parse()


class _Parser:
    """Sequential parser of a GGUF header; `remaining` is the number of bytes that metadata may still use."""

    def __init__(self, stream: IO[bytes], path: Path, mapping: mmap.mmap) -> None:
        self.stream, self.path, self.mapping, self.size = stream, path, mapping, len(mapping)
        self.remaining = min(self.size, _MAX_METADATA_BYTES)

    def parse(self) -> GGUFFile:
        """Parse the header, the metadata and the tensor table."""
        if self.read_bytes(4) != b"GGUF":
            raise FileFormatError(f"{self.path} is not a GGUF file.")
        version = self.number("<I")
        if version not in (2, 3):
            raise FileFormatError(f"{self.path} is GGUF of version {version}; versions 2 and 3 are supported.")
        tensors, keys = self.number("<Q"), self.number("<Q")
        if tensors > _MAX_TENSORS or keys > _MAX_KEYS:
            raise self.error(f"it claims {tensors} tensors and {keys} keys")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self.name()
            if key in metadata:
                raise self.error(f"the key {key!r} occurs twice")
            metadata[key] = self.value(self.number("<I"))
        return GGUFFile(self.path, version, metadata, self._tensors(tensors, _alignment(metadata, self)), self.mapping)

    def _tensors(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        """Parse the table of `count` tensors, whose offsets are relative to its aligned end."""
        entries = [self._tensor() for _ in range(count)]
        start = -(-self.stream.tell() // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, kind, shape, offset, nbytes in entries:
            if name in tensors:
                raise self.error(f"the tensor {name!r} occurs twice")
            if offset % alignment or start + offset + nbytes > self.size:
                raise self.error(f"the tensor {name!r} is outside the file")
            tensors[name] = TensorInfo(name, kind, shape, start + offset, nbytes)
        # Overlapping tensors would let a small file describe a model of any size.
        end = 0
        for info in sorted(tensors.values(), key=lambda info: info.offset):
            if info.offset < end:
                raise self.error(f"the tensor {info.name!r} overlaps another")
            end = info.offset + info.nbytes
        return tensors

    def _tensor(self) -> tuple[str, TensorKind, tuple[int, ...], int, int]:
        """Parse one entry: name, format, shape, relative offset and size in bytes."""
        name, dimensions = self.name(), self.number("<I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self.error(f"the tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self.number("<Q") for _ in range(dimensions))[::-1]
        code, offset = self.number("<I"), self.number("<Q")
        if code not in KINDS:
            supported = ", ".join(kind.name for kind in KINDS.values())
            raise FileFormatError(
                f"{self.path} stores {name!r} in an unsupported format (number {code}); supported are {supported}."
            )
        kind = KINDS[code]
        if not all(shape) or shape[-1] % kind.block or math.prod(shape) > _MAX_BYTES:
            raise self.error(f"the tensor {name!r} cannot have the shape {shape} in {kind.name}")
        return name, kind, shape, offset, math.prod(shape) // kind.block * kind.block_bytes

    # --- values ---

    def read_bytes(self, count: int) -> bytes:
        """Read exactly `count` bytes of the header."""
        if count > self.remaining:
            raise self.error("its header is longer than the file")
        content = self.stream.read(count)
        if len(content) != count:
            raise self.error("it ends inside its header")
        self.remaining -= count
        return content

    def number(self, form: str) -> int:
        """Read one number of a `struct` format such as "<I"."""
        return int(struct.unpack(form, self.read_bytes(struct.calcsize(form)))[0])

    def string(self) -> str:
        """Read a string, which has its length as a 64-bit integer in front."""
        return self.read_bytes(self.number("<Q")).decode("utf-8", "replace")

    def name(self) -> str:
        """Read the name of a key or tensor, a string of limited length."""
        length = self.number("<Q")
        if length > _MAX_NAME_BYTES:
            raise self.error(f"a name of {length} bytes is too long")
        return self.read_bytes(length).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """Parse a metadata value; `kind` is GGUF's type code."""
        if kind in _NUMBERS:
            return np.frombuffer(self.read_bytes(np.dtype(_NUMBERS[kind]).itemsize), _NUMBERS[kind])[0].item()
        if kind == _BOOL:
            return self.read_bytes(1) != b"\0"
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.number("<I"), self.number("<Q"))
        raise self.error(f"a value has the unknown type {kind}")

    def array(self, kind: int, count: int) -> Any:
        """Parse `count` numbers or bools (returned as an array), or strings (as a list)."""
        if kind == _STRING:
            return self.strings(count)
        if kind not in _NUMBERS and kind != _BOOL:
            raise self.error(f"a list has elements of type {kind}")
        form = np.dtype(_NUMBERS.get(kind, "<u1"))
        return np.frombuffer(self.read_bytes(count * form.itemsize), form)

    def strings(self, count: int) -> list[str]:
        """Parse a list of `count` strings in one loop: a vocabulary has hundreds of thousands."""
        start = position = self.stream.tell()
        end, length_at, texts = start + self.remaining, struct.Struct("<Q").unpack_from, list[str]()
        if count * 8 > self.remaining:  # each string takes at least the 8 bytes of its length
            raise self.error(f"a list of {count} strings is longer than the file")
        for _ in range(count):
            first = position + 8
            position = first + length_at(self.mapping, position)[0] if first <= end else end + 1
            if position > end:
                raise self.error("its header is longer than the file")
            texts.append(self.mapping[first:position].decode("utf-8", "replace"))
        self.stream.seek(position)
        self.remaining -= position - start
        return texts

    def error(self, reason: str) -> FileFormatError:
        return FileFormatError(f"{self.path} is a damaged GGUF file: {reason}.")


def _alignment(metadata: dict[str, Any], parser: _Parser) -> int:
    """Return the alignment of the tensor data in bytes, a power of two."""
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or value < 1 or value > 1 << 20 or value & (value - 1):
        raise parser.error(f"its tensors are aligned to {value!r} bytes")
    return value
