"""Links of the ledger: what each hash covers, and the seal that only the board's owner can make.

A link's hash covers its number, time, kind, content and the hash before it, so a change anywhere breaks every link from
there on. Whoever can write to the database could compute new hashes for all of them; the seal, a keyed hash whose key
lies in a file outside the database, is what they cannot compute.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewise._atomic import write_atomic
from tilewise._files import read_text_input
from tilewise.bench.jsontext import canonical
from tilewise.errors import MissingFileError, TilewiseError, UnavailableError

FIRST = "0" * 64
_KEY_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Link:
    """One row of the ledger, whose hash covers the hash of the row before."""

    seq: int
    at: str
    kind: str
    body: str  # canonical JSON
    previous: str
    hash: str
    seal: str


def link_hash(seq: int, at: str, kind: str, body: str, previous: str) -> str:
    content = canonical({"seq": seq, "at": at, "kind": kind, "body": body, "previous": previous})
    return hashlib.sha256(content).hexdigest()


def seal_of(key: bytes, link: str) -> str:
    """Return the seal of a link: an HMAC of its hash, which only the holder of the key can compute."""
    return hmac.new(key, link.encode(), hashlib.sha256).hexdigest()


def row_seal(key: bytes, table: str, *values: Any) -> str:
    """Return an HMAC over a row that the ledger does not cover, such as a job or a session."""
    return hmac.new(key, canonical([table, *values]), hashlib.sha256).hexdigest()


def make_link(key: bytes, seq: int, at: str, kind: str, body: dict[str, Any], previous: str) -> Link:
    """Create the next link (row) of the ledger: its hash covers the `previous` one, and `key` seals the hash."""
    text = canonical(body).decode()
    digest = link_hash(seq, at, kind, text, previous)
    seal = seal_of(key, digest)
    return Link(seq=seq, at=at, kind=kind, body=text, previous=previous, hash=digest, seal=seal)


def check_chain(links: Iterable[Link], key: bytes | None) -> tuple[int, str, list[str]]:
    """Check all links; return their number, the last one's hash, and descriptions of the first few faults."""
    faults: list[str] = []
    seq, previous = 0, FIRST
    for link in links:
        seq += 1
        if len(faults) < 5:
            faults += _faults(link, seq, previous, key)
        previous = link.hash
    return seq, previous, faults


def _faults(link: Link, expected: int, previous: str, key: bytes | None) -> list[str]:
    """Return what is wrong with a link: its number, previous hash, own hash or seal."""
    if link.seq != expected:
        return [f"link {expected} is missing or out of order: link {link.seq} stands in its place"]
    if link.previous != previous:
        return [f"link {link.seq} does not continue the link before it: one of them was altered or moved"]
    if link.hash != link_hash(link.seq, link.at, link.kind, link.body, link.previous):
        return [f"link {link.seq} was altered: its content does not give its hash"]
    if key is not None and not hmac.compare_digest(link.seal.encode(), seal_of(key, link.hash).encode()):
        return [f"link {link.seq} does not bear the board's seal: it was written by somebody without the key"]
    return []


def board_key(path: Path, create: bool) -> bytes | None:
    """Read the board's key from a file readable by its owner only; `create` makes a missing one."""
    try:
        key = bytes.fromhex(read_text_input(path, 4096).strip())
    except MissingFileError:
        return _create_key(path) if create else None
    except (TilewiseError, ValueError) as error:
        raise UnavailableError(f"the board's key in {path} cannot be read ({error})") from None
    if len(key) < _KEY_BYTES:  # with an empty key, anybody could seal links
        raise UnavailableError(f"the board's key in {path} is cut short: it has {len(key)} bytes of {_KEY_BYTES}")
    return key


def _create_key(path: Path) -> bytes | None:
    """Create a key file and return the key; if another process is faster, return its key."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    key = secrets.token_bytes(_KEY_BYTES)
    write_atomic(partial, key.hex() + "\n", private=True)
    try:
        os.link(partial, path)  # never replaces a key
    except FileExistsError:
        return board_key(path, create=False)
    except OSError as error:
        raise UnavailableError(f"the board's key cannot be written to {path} ({error.strerror})") from None
    finally:
        partial.unlink()
    return key
