"""Damage to good files, drawn from a seed: to their bytes, and to what the bytes mean.

Most changed bytes are caught by the outermost layer of a format (a length, a checksum, a zip directory), so half of the
damage goes inside: a JSON value becomes an odd one, an array another shape, type or content, and the layers around it
are made good again.
"""

from __future__ import annotations

import gzip
import io
import json
import sqlite3
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Rng = np.random.Generator
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 255, 65536, 2**31, 2**62, -(2**63), 10**30, 0.0, -0.0, 1e-320, 1e308, float("inf"),
    float("nan"), "", "x", "../../x", "/dev/zero", "\0", "é" * 50, "os:system", "1" * 400, [], [[]], {},
    {"": None}, [None] * 50,
)  # fmt: skip


def odd(rng: Rng) -> Any:
    return ODD[int(rng.integers(len(ODD)))]


def in_bytes(content: bytes, rng: Rng) -> bytes:
    """Cut, changed, replaced, reversed, doubled, or with an odd number in it."""
    data, kind = bytearray(content), int(rng.integers(7))
    at = int(rng.integers(len(data))) if data else 0
    length = int(rng.integers(1, 200))
    if kind == 0:
        return bytes(data[:at])
    if kind == 1 and data:
        for _ in range(int(rng.integers(1, 8))):
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
    elif kind == 2:
        data[at : at + length] = rng.bytes(int(rng.integers(0, 200)))
    elif kind == 3:
        data[at : at + length] = data[at : at + length][::-1]
    elif kind == 4:
        data[at:at] = data[at : at + length]
    elif kind == 5:
        width = int(rng.choice([1, 2, 4, 8]))
        number = int(rng.choice([0, 1, 2**7, 2**15, 2**31, 2**62])) % (1 << (8 * width))
        data[at : at + width] = number.to_bytes(width, str(rng.choice(["little", "big"])))  # type: ignore[arg-type]
    else:
        data[at : at + length] = b""
    return bytes(data)


def in_document(value: Any, rng: Rng) -> Any:
    """The same JSON document with one value odd, gone, doubled or under another name."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key, child in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
            places.append((node, key))
            walk(child)

    root = json.loads(json.dumps([value]))
    walk(root)
    node, key = places[int(rng.integers(len(places)))]
    kind = int(rng.integers(6))
    if kind == 0 and node is not root:
        del node[key]
    elif kind == 1 and isinstance(node, list) and node is not root:
        node.insert(key, node[key])
    elif kind == 2 and isinstance(node, dict):
        node[f"{key}x"] = node.pop(key)
    elif kind == 3 and isinstance(node[key], int | float) and not isinstance(node[key], bool):
        node[key] = node[key] * int(rng.choice([-1, 2, 1000, 10**9])) + int(rng.integers(-2, 3))
    else:
        node[key] = odd(rng)
    return root[0]


def in_json(content: bytes, rng: Rng) -> bytes:
    return json.dumps(in_document(json.loads(content), rng)).encode()


def in_lines(content: bytes, rng: Rng) -> bytes:
    """One of several JSON documents, a line each, damaged; a choice's own checksum is made good again."""
    from tilewise.tune.choose.cache import _body

    lines = content.splitlines()
    at = int(rng.integers(len(lines)))
    value = in_document(json.loads(lines[at]), rng)
    if isinstance(value, dict) and "check" in value and rng.random() < 0.8:
        import zlib

        value["check"] = zlib.crc32(_body(value))
    lines[at] = json.dumps(value).encode()
    return b"\n".join(lines) + b"\n"


def in_array(array: Any, rng: Rng) -> Any:
    """Another shape, type or content."""
    kind = int(rng.integers(7))
    flat = array.reshape(-1)
    if kind == 0:
        shapes = [(0,), (1,), (), (0, 3), (3, 0), (len(flat),), (1, len(flat)), (len(flat), 1), array.shape[::-1]]
        shape = shapes[int(rng.integers(len(shapes)))]
        return np.resize(flat, shape) if flat.size else np.zeros(shape, array.dtype)
    if kind == 1:
        with np.errstate(all="ignore"):
            return array.astype(rng.choice(["f2", "f4", "f8", "i1", "i4", "i8", "u1", "u8", "?"]))
    if kind == 2 and flat.size:
        values = [0, 1, -1, 127, 255, 2**31 - 1, 2**62, np.nan, np.inf, -np.inf, 1e-45, 3e38]
        changed = flat.copy()
        with np.errstate(all="ignore"):
            changed[int(rng.integers(len(flat)))] = np.array(values[int(rng.integers(len(values)))]).astype(array.dtype)
        return changed.reshape(array.shape)
    if kind == 3 and array.ndim:
        return array[: int(rng.integers(0, len(array) + 1))]
    if kind == 4 and array.ndim:
        return np.concatenate([array, array[:1]])
    if kind == 5 and array.ndim:
        return np.delete(array, 0, axis=int(rng.integers(array.ndim))) if array.size else array
    return rng.permutation(flat).reshape(array.shape)


def in_tensors(content: bytes, rng: Rng) -> bytes:
    """A safetensors file whose tensors, or the documents in its metadata, are damaged, and which is whole again."""
    from tilewise.io import load_arrays, save

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        path.write_bytes(content)
        arrays, metadata = load_arrays(path)
        if metadata and rng.random() < 0.5:
            name = list(metadata)[int(rng.integers(len(metadata)))]
            try:
                metadata[name] = json.dumps(in_document(json.loads(metadata[name]), rng))
            except ValueError:
                metadata[name] = str(odd(rng))
        elif arrays:
            name = list(arrays)[int(rng.integers(len(arrays)))]
            kind = int(rng.integers(8))
            if kind == 0:
                del arrays[name]
            elif kind == 1:
                arrays[f"{name}.0"] = arrays.pop(name)
            else:
                arrays[name] = in_array(arrays[name], rng)
        save(arrays, path, metadata)
        return path.read_bytes()


def in_header(content: bytes, rng: Rng) -> bytes:
    """A safetensors file whose header is damaged as a document, its length made good."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.get("__metadata__", {}).pop("sha256", None)
    text = json.dumps(in_document(header, rng)).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def in_npz(content: bytes, rng: Rng) -> bytes:
    with np.load(io.BytesIO(content), allow_pickle=False) as archive_path:
        arrays = dict(archive_path)
    name = list(arrays)[int(rng.integers(len(arrays)))]
    if arrays[name].dtype == np.uint8 and arrays[name][:1].tobytes() == b"{":
        text = json.dumps(in_document(json.loads(arrays[name].tobytes()), rng)).encode()
        arrays[name] = np.frombuffer(text, np.uint8)
    else:
        arrays[name] = in_array(arrays[name], rng)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for key, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
            archive.writestr(f"{key}.npy", member.getvalue())
    return out.getvalue()


def in_store(content: bytes, rng: Rng) -> bytes:
    """A SQLite file in which one value is odd, or a table is gone or something else."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.sqlite"
        path.write_bytes(content)
        db = sqlite3.connect(path)
        db.execute("PRAGMA journal_mode = DELETE")
        db.execute("PRAGMA foreign_keys = OFF")
        tables = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
        table = tables[int(rng.integers(len(tables)))]
        columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
        column = columns[int(rng.integers(len(columns)))]
        kind = int(rng.integers(8))
        try:
            if kind == 0:
                db.execute(f"DROP TABLE {table}")
            elif kind == 1:
                db.execute(f"ALTER TABLE {table} RENAME COLUMN {column} TO odd")
            elif kind == 2:
                db.execute(f"DROP TABLE {table}")
                endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) SELECT x FROM c"
                db.execute(f"CREATE VIEW {table} AS {endless}")
            elif kind == 3:
                first_row = db.execute(f"SELECT {column} FROM {table} LIMIT 1").fetchone()
                document = (
                    in_document(json.loads(first_row[0]), rng)
                    if first_row and isinstance(first_row[0], str)
                    else odd(rng)
                )
                db.execute(f"UPDATE {table} SET {column} = ?", (json.dumps(document),))
            else:
                value = odd(rng)
                fits = isinstance(value, str | bytes | float | None) or (isinstance(value, int) and abs(value) < 2**63)
                db.execute(f"UPDATE OR IGNORE {table} SET {column} = ?", (value if fits else str(value),))
        except (sqlite3.Error, ValueError, OverflowError):
            pass
        db.commit()
        db.close()
        return path.read_bytes()


def in_gzip(inside: Callable[[bytes, Rng], bytes]) -> Callable[[bytes, Rng], bytes]:
    return lambda content, rng: gzip.compress(inside(gzip.decompress(content), rng), 1, mtime=0)


def in_checked_json(content: bytes, rng: Rng) -> bytes:
    """Lines of text with a number replaced."""
    words = content.split(b",")
    words[int(rng.integers(len(words)))] = str(odd(rng)).encode()
    return b",".join(words)
