"""Positions of the weights in an ONNX file: the file's message without them, and the offset of each.

An ONNX file is one protobuf message, and nearly all of it is the raw bytes of weights. Parsed whole it would be in
memory three times: as the file's bytes, in the message, and as arrays. So the message is copied field by field without
those bytes (model.graph.initializer.raw_data), and arrays are filled straight from the file. What does not look like a
message here is left to the parser, which says what is wrong with it.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from typing import IO

Location = tuple[int, int]  # offset in the file, and bytes
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9  # the fields' numbers
_LEAST = 4096  # bytes worth leaving out
_MOST_FIELDS = 1 << 18  # looked at one by one here; a file of more goes to the parser, which is faster at it


@dataclass
class Skeleton:
    """A model's message without large weights; `locations` has each initializer's position in the file (None: kept)."""

    message: bytes
    locations: list[Location | None] = field(default_factory=list)
    fields: int = 0


def read_skeleton(stream: IO[bytes]) -> Skeleton | None:
    """Read a model's message without the raw data of its tensors; None if the stream cannot be mapped or parsed."""
    skeleton = Skeleton(b"")
    try:
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            skeleton.message = _copied(content, 0, len(content), (_GRAPH, _INITIALIZER), skeleton)
    except (ValueError, IndexError, OSError):  # an empty stream, or no message
        return None
    return skeleton if any(skeleton.locations) else None


def _copied(content: mmap.mmap, start: int, end: int, path: tuple[int, ...], skeleton: Skeleton) -> bytes:
    """Copy a message without raw data; `path` are the field numbers of nested messages on the way to it."""
    chunks: list[bytes] = []
    raw_fields = 0
    while start < end:
        skeleton.fields += 1
        key, body = _varint(content, start)
        body, stop = _body(content, key & 7, body)
        if stop > end or key >> 3 == 0 or skeleton.fields > _MOST_FIELDS:
            raise ValueError
        if path and key == path[0] << 3 | 2:
            count = len(skeleton.locations)
            inner = _copied(content, body, stop, path[1:], skeleton)
            if len(path) == 1 and len(skeleton.locations) == count:  # an initializer with its numbers inside
                skeleton.locations.append(None)
            chunks += [_as_varint(key), _as_varint(len(inner)), inner]
        elif not path and key == _RAW_DATA << 3 | 2 and stop - body >= _LEAST:
            skeleton.locations.append((body, stop - body))
        else:
            chunks.append(content[start:stop])
        raw_fields += not path and key == _RAW_DATA << 3 | 2
        start = stop
    if raw_fields > 1:
        raise ValueError  # of two the last one counts, which the parser knows
    return b"".join(chunks)


def _body(content: mmap.mmap, kind: int, start: int) -> tuple[int, int]:
    """Return (start, end) of the content of a field with this wire type."""
    if kind == 0:
        return start, _varint(content, start)[1]
    if kind == 2:
        length, start = _varint(content, start)
        return start, start + length
    return start, start + {1: 8, 5: 4}.get(kind, len(content) + 1)


def _varint(content: mmap.mmap, start: int) -> tuple[int, int]:
    """Decode a protobuf varint; return (value, position after it)."""
    value = 0
    for at in range(start, start + 10):
        value |= (content[at] & 0x7F) << 7 * (at - start)
        if content[at] < 0x80:
            return value, at + 1
    raise ValueError


def _as_varint(value: int) -> bytes:
    """Encode an unsigned integer as a protobuf varint: 7 bits per byte, lowest first."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
