"""Read one large array of an npz file chunk by chunk, and single npy files; both are as little trusted as in `npz`."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tilewise._files import open_input
from tilewise.costmodel.data.npz import (
    MAX_FILE_BYTES,
    Array,
    check_end,
    check_size,
    damage_as_error,
    fill_from,
    list_members,
    open_member,
    open_zip,
    read_header,
)
from tilewise.errors import FileFormatError

_CHUNK_NUMBERS = 1 << 20  # 4 to 8 MiB per chunk of `stream_npz`


def stream_npz(path: Path, key: str, shape: tuple[int, ...], max_file_bytes: int = MAX_FILE_BYTES) -> Iterator[Array]:
    """Yield the values of one array in C order, as flat arrays of a few MiB; the array may be larger than the memory.

    `shape` is the shape that the array must have.
    """
    where, remaining = f"{path}: {key}", math.prod(shape)
    with contextlib.ExitStack() as stack:
        with damage_as_error(path, "npz"):
            archive = stack.enter_context(open_zip(stack.enter_context(open_input(path, max_file_bytes)), path))
            info = list_members(archive, path).get(key)
            if info is None:
                raise FileFormatError(f"{path} lacks {key}.")
            stream = stack.enter_context(open_member(archive, info, where))
            dtype, fortran, header_shape, header_bytes = read_header(stream, where)
            if header_shape != shape or fortran:
                order = " in column-major order" if fortran else ""
                raise FileFormatError(f"{where} has shape {header_shape}{order} where {shape} is needed.")
            check_size(header_shape, dtype, header_bytes, info, where)
        # Only the reading is guarded: an exception of the caller while it has a chunk must pass through unchanged.
        while remaining:
            chunk = np.empty(min(remaining, _CHUNK_NUMBERS), dtype)
            with damage_as_error(path, "npz"):
                fill_from(stream, chunk.view(np.uint8).data, where)
            remaining -= len(chunk)
            yield chunk
        with damage_as_error(path, "npz"):
            check_end(stream, where)


def read_npy(path: Path, max_bytes: int) -> Array:
    """Read the array of one npy file of at most `max_bytes`."""
    with damage_as_error(path, "npy"), open_input(path, max_bytes) as stream:
        dtype, fortran, shape, header_bytes = read_header(stream, str(path), max_axes=8)
        count, data_bytes = math.prod(shape), os.fstat(stream.fileno()).st_size - header_bytes
        if count * dtype.itemsize != data_bytes or max(shape, default=0) > max_bytes:
            raise FileFormatError(f"{path} has shape {shape} in its header and {data_bytes} bytes of numbers.")
        flat = np.empty(count, dtype)
        fill_from(stream, flat.view(np.uint8).data, str(path))
    return np.ascontiguousarray(flat.reshape(shape, order="F" if fortran else "C"), dtype=dtype.newbyteorder("="))
