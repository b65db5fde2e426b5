"""Arrays over a pipe between harness and plugin: a length, then NumPy's own format, never a pickle.

Both ends are bounded: a message is at most 64 MiB, and its header is read by NumPy's parser with pickles off.
"""

from __future__ import annotations

import io
import os
import select
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
MOST_BYTES = 64 << 20
_LENGTH = struct.Struct("<Q")


class Ended(Exception):
    """The other side is gone, or does not speak this language."""


def encode(array: Array) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.ascontiguousarray(array), allow_pickle=False)
    return _LENGTH.pack(stream.tell()) + stream.getvalue()


def decode(content: bytes) -> Array:
    try:
        array: Array = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
        return array
    except (ValueError, EOFError, OSError, MemoryError) as error:
        raise Ended(f"an answer is not an array ({type(error).__name__})") from None


def send(descriptor: int, message: bytes) -> None:
    view = memoryview(message)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError:
        raise Ended("it stopped reading") from None


def receive(descriptor: int, timeout: float | None = None) -> bytes:
    """One message, without its length; Ended when nothing comes for `timeout` seconds."""
    (length,) = _LENGTH.unpack(_read(descriptor, _LENGTH.size, timeout))
    if length > MOST_BYTES:
        raise Ended("it sent a message of absurd length")
    return _read(descriptor, length, timeout)


def _read(descriptor: int, count: int, timeout: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        if timeout is not None and not select.select([descriptor], [], [], timeout)[0]:
            raise Ended(f"it gave no answer within {timeout:g} s")
        piece = os.read(descriptor, min(count - len(parts), 1 << 20))
        if not piece:
            raise Ended("its process ended")
        parts += piece
    return bytes(parts)
