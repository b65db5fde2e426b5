"""Damage by other hands than `damage`: what nature does to files, and mutations that find structure by themselves.

Natural damage is what copying, downloading, editing and unpacking do to a file. The structure-aware mutations know no
format of this project: they take gzip, zip, JSON and SQLite apart as anybody would, and look for numbers that may be
lengths in everything else. If `pyradamsa` is installed, the general-purpose mutator radamsa does a third of the work.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
import sqlite3
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

try:
    from pyradamsa import Radamsa
except ImportError:
    Radamsa = None

Rng = np.random.Generator
Mutation = Callable[[bytes, Rng], bytes]
_PAGE = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body>Please sign in to continue.</body></html>\n"
_CONTROL = "\x1b[2J\x1b]0;owned\x07\u202e\x00\x08\r"
_LARGEST = 4 << 20  # bytes of a mutated file
_RADAMSA_BYTES = 64 << 10  # radamsa takes half a second for larger files


# --- natural damage ---


def cut_short(content: bytes, rng: Rng) -> bytes:
    """A download that ended early, at any place or at the end of a block."""
    at = int(rng.integers(len(content) + 1))
    return content[: at if rng.random() < 0.5 else at // 512 * 512]


def half_copied(content: bytes, rng: Rng) -> bytes:
    """A copy whose blocks from some place on were never written."""
    at = int(rng.integers(len(content) + 1))
    return content[:at] + bytes(len(content) - at)


def missing_block(content: bytes, rng: Rng) -> bytes:
    """A block of zeros, as after a crash."""
    at = int(rng.integers(len(content) // 512 + 1)) * 512
    return content[:at] + bytes(min(512, len(content) - at)) + content[at + 512 :]


def windows_lines(content: bytes, rng: Rng) -> bytes:
    return content.replace(b"\n", b"\r\n") if rng.random() < 0.7 else content.replace(b"\r\n", b"\n")


def byte_order_mark(content: bytes, rng: Rng) -> bytes:
    """A byte order mark, or the whole file in another encoding."""
    if rng.random() < 0.5:
        return b"\xef\xbb\xbf" + content
    encoding = str(rng.choice(["utf-16", "utf-16-be", "utf-32", "latin-1"]))
    return content.decode("utf-8", "replace").encode(encoding, "replace")


def through_a_text_editor(content: bytes, rng: Rng) -> bytes:
    """Bytes that are not UTF-8 become replacement characters."""
    return content.decode("utf-8", "replace").encode()


def other_endianness(content: bytes, rng: Rng) -> bytes:
    """A stretch of the file in the other byte order."""
    width = int(rng.choice([2, 4, 8]))
    at = int(rng.integers(len(content) + 1))
    length = min(int(rng.choice([width, 64, 4096])), len(content) - at) // width * width
    middle = np.frombuffer(content[at : at + length], f"u{width}").byteswap().tobytes()
    return content[:at] + middle + content[at + length :]


def sign_in_page(content: bytes, rng: Rng) -> bytes:
    """What a web site sends in place of a file, or in the middle of it."""
    return _PAGE if rng.random() < 0.5 else content[: len(content) // 2] + _PAGE


def packed_again(content: bytes, rng: Rng) -> bytes:
    packed = gzip.compress(content, 1, mtime=0)
    return packed if rng.random() < 0.5 else packed[: int(rng.integers(len(packed)))]


def twice(content: bytes, rng: Rng) -> bytes:
    return content + content if rng.random() < 0.5 else content + _PAGE


def zeros(content: bytes, rng: Rng) -> bytes:
    return bytes(int(rng.choice([0, 1, 7, 4096, len(content), 1 << 20])))


# --- structure-aware mutations ---


def lengths(content: bytes, rng: Rng) -> bytes:
    """Change a number that may be the length of what follows it."""
    data = bytearray(content)
    for _ in range(64):
        width = int(rng.choice([1, 2, 4, 8]))
        if len(data) <= width:
            break
        at = int(rng.integers(min(len(data) - width, 4096 if rng.random() < 0.7 else len(data))))
        value = int.from_bytes(data[at : at + width], "little")
        if 0 < value <= len(data) - at:
            choices = [value + 1, value - 1, value * 2, 0, len(data), (1 << (8 * width)) - 1, 1 << (8 * width - 1)]
            changed = choices[int(rng.integers(len(choices)))] % (1 << (8 * width))
            data[at : at + width] = changed.to_bytes(width, "little")
            break
    return bytes(data)


def havoc(content: bytes, rng: Rng) -> bytes:
    """Flipped bits, small sums, copied and swapped stretches, several at once."""
    data = bytearray(content)
    for _ in range(int(rng.choice([1, 2, 4, 16]))):
        if not data:
            break
        at, length = int(rng.integers(len(data))), int(rng.integers(1, 64))
        kind = int(rng.integers(5))
        if kind == 0:
            data[at] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            data[at] = (data[at] + int(rng.integers(-35, 36))) % 256
        elif kind == 2:
            other = int(rng.integers(len(data)))
            data[at : at + length] = data[other : other + length]
        elif kind == 3:
            data[at:at] = bytes(rng.integers(0, 256, length, dtype=np.uint8))
        else:
            del data[at : at + length]
    return bytes(data)


def tokens(content: bytes, rng: Rng) -> bytes:
    """Replace, double or remove a number, a word or a bracket of a text."""
    matches = list(re.finditer(rb'-?\d+(?:\.\d+)?|"[^"\n]{0,200}"|[A-Za-z_]{2,40}|[\[\]{}(),:;=]', content[:200_000]))
    if not matches:
        return havoc(content, rng)
    match = matches[int(rng.integers(len(matches)))]
    word = match.group()
    odd_words = [b"", word * 2, word + word[::-1], b"-1", b"1e999", b"9" * 400, b"NaN", b"null", b"[[", b'"', b"\x00"]
    odd_words += [_CONTROL.encode(), b'"' + b"a" * 70_000 + b'"', b"[" * 20_000, b'{"a":' * 20_000, b"None", b"%s%n"]
    odd_words += [matches[int(rng.integers(len(matches)))].group()]
    word = odd_words[int(rng.integers(len(odd_words)))]
    return content[: match.start()] + word + content[match.end() :]


def json_values(content: bytes, rng: Rng) -> bytes:
    """Put a long, deep or unprintable value or name at a random place of a JSON document (or of one of its lines)."""
    lines = content.splitlines() if content.count(b"\n") > 1 and not content.lstrip().startswith(b"[") else [content]
    at = int(rng.integers(len(lines)))
    root = [json.loads(lines[at])]
    places: list[tuple[Any, Any]] = []
    stack: list[Any] = [root]
    while stack:
        node = stack.pop()
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                stack.append(node[key])
    node, key = places[int(rng.integers(len(places)))]
    deep: Any = 0
    for _ in range(900):
        deep = [deep]
    values: list[Any] = ["x" * 70_000, _CONTROL * 40, deep, 10**400, {str(n): n for n in range(2000)}, [0] * 20_000, -1]
    values += [node[key], {}, [], None, True, 1e308, "NaN", str(node[key])[:1000]]
    value = values[int(rng.integers(len(values)))]
    if isinstance(node, dict) and rng.random() < 0.3:
        node[_CONTROL + "k" * int(rng.choice([1, 5000]))] = node.pop(key)
    else:
        node[key] = value
    lines[at] = json.dumps(root[0]).encode()
    return b"\n".join(lines)


def inside_gzip(content: bytes, rng: Rng) -> bytes:
    return gzip.compress(mutated(gzip.decompress(content), rng), 1, mtime=0)


def inside_zip(content: bytes, rng: Rng) -> bytes:
    """Mutate, rename, remove or double a member of a zip archive."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    at = int(rng.integers(len(members)))
    name, inner = members[at]
    kind = int(rng.integers(6))
    if kind == 0:
        del members[at]
    elif kind == 1:
        members[at] = (str(rng.choice(["../x", "", name + _CONTROL, "a" * 5000, "/etc/passwd"])), inner)
    elif kind == 2:
        members.append((name, inner))
    else:
        members[at] = (name, mutated(inner, rng))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive, contextlib.suppress(UserWarning):
        for name, inner in members:
            archive.writestr(name, inner)
    return out.getvalue()


def inside_database(content: bytes, rng: Rng) -> bytes:
    """Empty a table, or put long, unprintable or wrong values into it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        path.write_bytes(content)
        connection = sqlite3.connect(path, isolation_level=None)
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        table = str(rng.choice(tables))
        column = str(rng.choice([row[1] for row in connection.execute(f"PRAGMA table_info({table})")]))
        values: list[Any] = [
            None,
            -1,
            2**62,
            1e308,
            "",
            "x" * 70_000,
            _CONTROL * 40,
            "[" * 2000,
            "{}",
            "[]",
            "null",
            b"\0",
        ]
        value = values[int(rng.integers(len(values)))]
        statements = [f"DELETE FROM {table}", f"UPDATE OR IGNORE {table} SET {column} = ?"]
        statements += [f"DELETE FROM {table} WHERE rowid % 2", f"UPDATE OR IGNORE {table} SET rowid = rowid + 100000"]
        statements += [f"UPDATE OR IGNORE {table} SET {column} = ? WHERE rowid % 2"] * 2
        statement = str(rng.choice(statements))
        with contextlib.suppress(sqlite3.Error):
            connection.execute("PRAGMA foreign_keys = OFF")
            connection.execute("PRAGMA ignore_check_constraints = ON")
            connection.execute(statement, (value,) if "?" in statement else ())
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.close()
        return path.read_bytes()


def radamsa(content: bytes, rng: Rng) -> bytes:
    return bytes(Radamsa().fuzz(content, seed=int(rng.integers(1 << 31)), max_mut=len(content) + 65_536))


NATURAL: tuple[Mutation, ...] = (cut_short, half_copied, missing_block, windows_lines, byte_order_mark)
NATURAL += (through_a_text_editor, other_endianness, sign_in_page, packed_again, twice, zeros)
STRUCTURED: tuple[Mutation, ...] = (lengths, havoc, tokens, tokens, json_values)


def mutated(content: bytes, rng: Rng) -> bytes:
    """Return a mutated file: by radamsa, by nature, or by taking apart what the file seems to be."""
    choice = rng.random()
    if Radamsa is not None and choice < 1 / 3 and len(content) < _RADAMSA_BYTES:
        mutation: Mutation = radamsa
    elif choice < 0.5:
        mutation = NATURAL[int(rng.integers(len(NATURAL)))]
    elif content[:2] == b"\x1f\x8b" and choice < 0.9:
        mutation = inside_gzip
    elif content[:4] == b"PK\x03\x04" and choice < 0.9:
        mutation = inside_zip
    elif content[:15] == b"SQLite format 3" and choice < 0.9:
        mutation = inside_database
    else:
        mutation = STRUCTURED[int(rng.integers(len(STRUCTURED)))]
    try:
        return mutation(content, rng)[:_LARGEST]
    except Exception:  # it is not what it seems to be, or no longer
        return havoc(content, rng)
