"""A GGUF file: its metadata, and where each tensor lies.

Nothing that the file says is believed before it was compared with what there is: counts and lengths with the bytes that
are left, tensors with the file's end, names with those seen before. A file that does not fit is one sentence, and never
more memory than a few times its metadata. Tensors are read one at a time, when they are asked for.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from tilewise._files import convert_read_errors, open_input
from tilewise.errors import FileFormatError
from tilewise.gguf.tensors import KINDS, TensorKind

Array = npt.NDArray[Any]
Path = str | os.PathLike[str]
_MOST_BYTES = 1 << 40
_MOST_METADATA = 1 << 28
_MOST_KEYS, _MOST_TENSORS, _MOST_NAME = 1 << 16, 1 << 17, 1 << 10
_MOST_DIMENSIONS = 4
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True)
class TensorPlace:
    """One tensor: its kind, its shape as NumPy says it (rows first), and its bytes in the file."""

    name: str
    kind: TensorKind
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """What a file holds; `metadata` values are numbers, truth values, strings, arrays or lists of strings."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorPlace] = field(repr=False)

    def read(self, name: str) -> Array:
        """The stored bytes of a tensor, (blocks, bytes of a block)."""
        place = self.tensors[name]
        with open_input(self.path, _MOST_BYTES) as stream, convert_read_errors(self.path):
            stream.seek(place.offset)
            content = stream.read(place.nbytes)
        if len(content) != place.nbytes:
            raise FileFormatError(f"{self.path} ended while it was read.")
        return np.frombuffer(content, np.uint8).reshape(-1, place.kind.block_bytes)

    def floats(self, name: str) -> Array:
        """A tensor as float32."""
        place = self.tensors[name]
        with np.errstate(all="ignore"):  # what is not a number is refused below
            values = place.kind.to_floats(self.read(name)).reshape(place.shape)
        if not np.isfinite(values).all():
            raise FileFormatError(f"{self.path} is no usable model: {name!r} holds NaN or infinity.")
        return values


def read_gguf(path: Path) -> GGUFFile:
    """The metadata and the tensors' places of a GGUF file (version 2 or 3, little-endian)."""
    with open_input(path, _MOST_BYTES) as stream, convert_read_errors(path):
        size = os.fstat(stream.fileno()).st_size
        return _Parser(stream, path, size).parse()


class _Parser:
    """Reads forward through the header; `left` are the bytes that metadata may still take."""

    def __init__(self, stream: IO[bytes], path: Path, size: int) -> None:
        self.stream, self.path, self.size = stream, path, size
        self.left = min(size, _MOST_METADATA)

    def parse(self) -> GGUFFile:
        if self.size < 24 or self.take(4) != b"GGUF":
            raise FileFormatError(f"{self.path} is not a GGUF file.")
        version = self.number("<I")
        if version not in (2, 3):
            raise FileFormatError(f"{self.path} is GGUF of version {version}; versions 2 and 3 are read.")
        tensors, keys = self.number("<Q"), self.number("<Q")
        if tensors > _MOST_TENSORS or keys > _MOST_KEYS:
            raise self.wrong(f"it claims {tensors} tensors and {keys} keys")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self.name()
            if key in metadata:
                raise self.wrong(f"the key {key!r} stands twice")
            metadata[key] = self.value(self.number("<I"))
        return GGUFFile(self.path, version, metadata, self._tensors(tensors, _alignment(metadata, self)))

    def _tensors(self, count: int, alignment: int) -> dict[str, TensorPlace]:
        found = [self._tensor() for _ in range(count)]
        start = -(-self.stream.tell() // alignment) * alignment
        tensors: dict[str, TensorPlace] = {}
        for name, kind, shape, offset, nbytes in found:
            if name in tensors:
                raise self.wrong(f"the tensor {name!r} stands twice")
            if offset % alignment or start + offset + nbytes > self.size:
                raise self.wrong(f"the tensor {name!r} does not lie inside it")
            tensors[name] = TensorPlace(name, kind, shape, start + offset, nbytes)
        return tensors

    def _tensor(self) -> tuple[str, TensorKind, tuple[int, ...], int, int]:
        name, dimensions = self.name(), self.number("<I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise self.wrong(f"the tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self.number("<Q") for _ in range(dimensions))[::-1]
        code, offset = self.number("<I"), self.number("<Q")
        if code not in KINDS:
            usable = ", ".join(kind.name for kind in KINDS.values())
            raise FileFormatError(
                f"{self.path} stores {name!r} in a form (number {code}) that is not read: {usable} are."
            )
        kind = KINDS[code]
        if not all(shape) or shape[-1] % kind.block or math.prod(shape) > _MOST_BYTES:
            raise self.wrong(f"the tensor {name!r} cannot have the shape {shape} in {kind.name}")
        return name, kind, shape, offset, math.prod(shape) // kind.block * kind.block_bytes

    # --- values ---

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise self.wrong("its header is longer than it")
        content = self.stream.read(count)
        if len(content) != count:
            raise self.wrong("it ends inside its header")
        self.left -= count
        return content

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def string(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8", "replace")

    def name(self) -> str:
        length = self.number("<Q")
        if length > _MOST_NAME:
            raise self.wrong(f"a name of {length} bytes is too long")
        return self.take(length).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return np.frombuffer(self.take(np.dtype(_NUMBERS[kind]).itemsize), _NUMBERS[kind])[0].item()
        if kind == _BOOL:
            return self.take(1) != b"\0"
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.number("<I"), self.number("<Q"))
        raise self.wrong(f"a value has the unknown type {kind}")

    def array(self, kind: int, count: int) -> Any:
        if kind == _STRING:
            if count * 8 > self.left:
                raise self.wrong(f"a list of {count} strings is longer than it")
            return [self.string() for _ in range(count)]
        if kind not in _NUMBERS and kind != _BOOL:
            raise self.wrong(f"a list has elements of type {kind}")
        form = np.dtype(_NUMBERS.get(kind, "<u1"))
        return np.frombuffer(self.take(count * form.itemsize), form)

    def wrong(self, why: str) -> FileFormatError:
        return FileFormatError(f"{self.path} is a damaged GGUF file: {why}.")


def _alignment(metadata: dict[str, Any], parser: _Parser) -> int:
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or value < 1 or value > 1 << 20 or value & (value - 1):
        raise parser.wrong(f"its tensors are aligned to {value!r} bytes")
    return value
