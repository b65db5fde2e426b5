"""The IDX format of MNIST: two zero bytes, a type, a number of dimensions, the sizes, then the bytes.

Nothing is allocated on the word of a header: the sizes must multiply to what the file really holds, and a gzip file is
unpacked no further than its header allows.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from tilewise._files import open_input
from tilewise.errors import FileFormatError, UnavailableError

_UNSIGNED_BYTE = 8
_MOST_BYTES = 256 << 20  # ten thousand times an image's, and five times the largest of these files
_CHUNK = 1 << 20


def read_idx(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """The array of unsigned bytes in an IDX file with that many dimensions."""
    try:
        with open_input(path, _MOST_BYTES) as file, _unfolded(file, path) as stream:
            shape = _read_shape(stream, path, dimensions)
            body = _read_exactly(stream, math.prod(shape), path)
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise UnavailableError(f"{path} cannot be read: {error.strerror}") from None
        raise FileFormatError(f"{path} is not a whole gzip file") from None
    return np.frombuffer(body, np.uint8).reshape(shape)


def _unfolded(file: IO[bytes], path: Path) -> gzip.GzipFile | IO[bytes]:
    return gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file


def _read_shape(stream: gzip.GzipFile | IO[bytes], path: Path, dimensions: int) -> tuple[int, ...]:
    head = stream.read(4)
    if len(head) < 4 or head[:2] != b"\0\0":
        raise FileFormatError(f"{path} is not an IDX file: it does not start with its magic number")
    if head[2] != _UNSIGNED_BYTE or head[3] != dimensions:
        raise FileFormatError(
            f"{path} holds type {head[2]} in {head[3]} dimensions; expected unsigned bytes (8) in {dimensions}"
        )
    sizes = stream.read(4 * dimensions)
    if len(sizes) < 4 * dimensions:
        raise FileFormatError(f"{path} ends inside its header")
    shape: tuple[int, ...] = struct.unpack(f">{dimensions}I", sizes)
    if math.prod(shape) > _MOST_BYTES:
        raise FileFormatError(f"{path} claims {' × '.join(map(str, shape))} bytes, more than the {_MOST_BYTES} allowed")
    return shape


def _read_exactly(stream: gzip.GzipFile | IO[bytes], count: int, path: Path) -> bytearray:
    body = bytearray()
    while len(body) < count:  # in pieces, so that memory follows the file and not its header
        piece = stream.read(min(_CHUNK, count - len(body)))
        if not piece:
            raise FileFormatError(f"{path} ends after {len(body)} of the {count} bytes its header claims")
        body += piece
    if stream.read(1):
        raise FileFormatError(f"{path} goes on after the {count} bytes its header claims")
    return body
