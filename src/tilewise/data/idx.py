"""Read the IDX format of MNIST: two zero bytes, a type, the number of dimensions, the sizes, then the data.

The header is not trusted: memory grows with the data that is read, and a gzip file is decompressed no further than the
size in its header.
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

_UNSIGNED_BYTE = 8  # type code of the format
_MAX_BYTES = 256 << 20  # five times the largest MNIST file
_CHUNK_BYTES = 1 << 20


def read_idx(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """Read the array of unsigned bytes in an IDX file; it must have this number of dimensions."""
    try:
        with open_input(path, _MAX_BYTES) as file, _decompressed(file, path) as stream:
            shape = _read_shape(stream, path, dimensions)
            body = _read_exactly(stream, math.prod(shape), path)
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise UnavailableError(f"{path} cannot be read: {error.strerror}") from None
        raise FileFormatError(f"{path} is not a complete gzip file") from None
    return np.frombuffer(body, np.uint8).reshape(shape)


def _decompressed(file: IO[bytes], path: Path) -> gzip.GzipFile | IO[bytes]:
    return gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file


def _read_shape(stream: gzip.GzipFile | IO[bytes], path: Path, dimensions: int) -> tuple[int, ...]:
    """Read and check the header; return the array's shape."""
    head = stream.read(4)
    if len(head) < 4 or head[:2] != b"\0\0":
        raise FileFormatError(f"{path} is not an IDX file: it does not start with its magic number")
    if head[2] != _UNSIGNED_BYTE or head[3] != dimensions:
        raise FileFormatError(
            f"{path} contains type {head[2]} in {head[3]} dimensions; expected unsigned bytes (8) in {dimensions}"
        )
    sizes = stream.read(4 * dimensions)
    if len(sizes) < 4 * dimensions:
        raise FileFormatError(f"{path} ends inside its header")
    shape: tuple[int, ...] = struct.unpack(f">{dimensions}I", sizes)
    if math.prod(shape) > _MAX_BYTES:
        size = " × ".join(map(str, shape))
        raise FileFormatError(f"{path} claims {size} bytes, more than the limit of {_MAX_BYTES}")
    return shape


def _read_exactly(stream: gzip.GzipFile | IO[bytes], count: int, path: Path) -> bytearray:
    """Read `count` bytes and check that nothing follows them."""
    body = bytearray()
    while len(body) < count:  # in chunks, so that memory grows with the file and not with its header
        chunk = stream.read(min(_CHUNK_BYTES, count - len(body)))
        if not chunk:
            raise FileFormatError(f"{path} ends after {len(body)} of the {count} bytes its header claims")
        body += chunk
    if stream.read(1):
        raise FileFormatError(f"{path} continues after the {count} bytes its header claims")
    return body
