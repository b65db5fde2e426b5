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

Place = tuple[int, int]  # offset in the file, and bytes
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9  # the fields' numbers
_LEAST = 4096  # bytes worth leaving out
_MOST_FIELDS = 1 << 18  # looked at one by one here; a file of more goes to the parser, which is faster at it


class _Unclear(Exception):
    """Not a message that this file understands."""


@dataclass
class Outline:
    """A model's message without its large weights; for every initializer in order, where they lie (None: in it)."""

    message: bytes
    places: list[Place | None] = field(default_factory=list)
    fields: int = 0


def outline(stream: IO[bytes]) -> Outline | None:
    """None where the stream does not hold such a message, or is not a file with a size."""
    size = os.fstat(stream.fileno()).st_size
    record = Outline(b"")
    try:
        record.message = b"".join(_model(stream, size, record))
    except (_Unclear, OSError):
        return None
    return record if size and any(record.places) else None


def _model(stream: IO[bytes], size: int, record: Outline) -> list[bytes]:
    parts: list[bytes] = []
    while stream.tell() < size:
        key, head, end = _field(stream, size, record)
        if key == _GRAPH << 3 | 2:
            parts += _nested(key, _graph(stream, end, record))
        else:
            parts += [head, _exactly(stream, end - stream.tell())]
    return parts


def _graph(stream: IO[bytes], end: int, record: Outline) -> list[bytes]:
    parts: list[bytes] = []
    while stream.tell() < end:
        key, head, stop = _field(stream, end, record)
        if key == _INITIALIZER << 3 | 2:
            inner, place = _tensor(stream, stop, record)
            parts += _nested(key, inner)
            record.places.append(place)
        else:
            parts += [head, _exactly(stream, stop - stream.tell())]
    return parts


def _tensor(stream: IO[bytes], end: int, record: Outline) -> tuple[list[bytes], Place | None]:
    parts: list[bytes] = []
    place: Place | None = None
    is_stored = False
    while stream.tell() < end:
        key, head, stop = _field(stream, end, record)
        start = stream.tell()
        if key == _RAW_DATA << 3 | 2:
            if is_stored:
                raise _Unclear  # of two the last one counts
            is_stored = True
            if stop - start >= _LEAST:
                place = (start, stop - start)
                stream.seek(stop)
                continue
        parts += [head, _exactly(stream, stop - start)]
    return parts, place


def _nested(key: int, parts: list[bytes]) -> list[bytes]:
    return [_varint(key), _varint(sum(map(len, parts))), *parts]


def _field(stream: IO[bytes], end: int, record: Outline) -> tuple[int, bytes, int]:
    """A field's key, the bytes of its head, and where its content ends."""
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
