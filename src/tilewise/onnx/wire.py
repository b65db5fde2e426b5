"""Positions of the weights in an ONNX file: the file's message without them, and the offset of each.

An ONNX file is one protobuf message, and nearly all of it is the raw bytes of weights. Parsed whole it would be in
memory three times: as the file's bytes, in the message, and as arrays. So the message is copied field by field without
those bytes (model.graph.initializer.raw_data), and arrays are filled straight from the file. What does not look like a
message here is left to the parser, which says what is wrong with it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import IO

Location = tuple[int, int]  # offset in the file, and bytes
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9  # the fields' numbers
_LEAST = 4096  # bytes worth leaving out
_MOST_FIELDS = 1 << 18  # looked at one by one here; a file of more goes to the parser, which is faster at it


class _Unclear(Exception):
    """Not a message that this file understands."""


@dataclass
class Skeleton:
    """A model's message without its large weights; for every initializer in order, where they lie (None: in it)."""

    message: bytes
    locations: list[Location | None] = field(default_factory=list)
    fields: int = 0


def read_skeleton(stream: IO[bytes]) -> Skeleton | None:
    """Read a message without its tensors' raw data; None if the stream is not a file or holds no such message."""
    size = os.fstat(stream.fileno()).st_size
    record = Skeleton(b"")
    try:
        record.message = b"".join(_model(stream, size, record))
    except (_Unclear, OSError):
        return None
    return record if size and any(record.locations) else None


def _model(stream: IO[bytes], size: int, record: Skeleton) -> list[bytes]:
    chunks: list[bytes] = []
    while stream.tell() < size:
        key, head, end = _field(stream, size, record)
        if key == _GRAPH << 3 | 2:
            chunks += _nested(key, _graph(stream, end, record))
        else:
            chunks += [head, _exactly(stream, end - stream.tell())]
    return chunks


def _graph(stream: IO[bytes], end: int, record: Skeleton) -> list[bytes]:
    """Copy the graph's fields; initializers without their large raw data."""
    chunks: list[bytes] = []
    while stream.tell() < end:
        key, head, stop = _field(stream, end, record)
        if key == _INITIALIZER << 3 | 2:
            inner, location = _tensor(stream, stop, record)
            chunks += _nested(key, inner)
            record.locations.append(location)
        else:
            chunks += [head, _exactly(stream, stop - stream.tell())]
    return chunks


def _tensor(stream: IO[bytes], end: int, record: Skeleton) -> tuple[list[bytes], Location | None]:
    """Copy a tensor's fields without its raw data, and return where that is stored."""
    chunks: list[bytes] = []
    location: Location | None = None
    is_stored = False
    while stream.tell() < end:
        key, head, stop = _field(stream, end, record)
        start = stream.tell()
        if key == _RAW_DATA << 3 | 2:
            if is_stored:
                raise _Unclear  # of two the last one counts
            is_stored = True
            if stop - start >= _LEAST:
                location = (start, stop - start)
                stream.seek(stop)
                continue
        chunks += [head, _exactly(stream, stop - start)]
    return chunks, location


def _nested(key: int, chunks: list[bytes]) -> list[bytes]:
    return [_varint(key), _varint(sum(map(len, chunks))), *chunks]


def _field(stream: IO[bytes], end: int, record: Skeleton) -> tuple[int, bytes, int]:
    """Return a field's key, the bytes of its head, and the end of its content."""
    record.fields += 1
    if record.fields > _MOST_FIELDS:
        raise _Unclear
    start = stream.tell()
    key = _read_varint(stream)
    kind, before = key & 7, stream.tell()
    if kind == 0:
        _read_varint(stream)
        stop = stream.tell()
        stream.seek(before)
    elif kind in (1, 5):
        stop = before + (8 if kind == 1 else 4)
    elif kind == 2:
        length = _read_varint(stream)
        before = stream.tell()
        stop = before + length
    else:
        raise _Unclear
    if stop > end or key >> 3 == 0:
        raise _Unclear
    stream.seek(start)
    return key, _exactly(stream, before - start), stop


def _read_varint(stream: IO[bytes]) -> int:
    """Read an integer of variable length, seven bits per byte."""
    value = 0
    for shift in range(0, 70, 7):
        byte = _exactly(stream, 1)[0]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value
    raise _Unclear


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _exactly(stream: IO[bytes], count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise _Unclear
    return data
