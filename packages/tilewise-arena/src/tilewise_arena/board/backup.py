"""Backup and restore: the whole board as lines of JSON, the same for SQLite and PostgreSQL.

The first line says what the file is; then come the links of the ledger, the files, the tokens' hashes and the queue.
The entries are not in it: they follow from the ledger, and restoring replays it. A backup made on the command line also
holds the board's key, without which a restored board could not be continued, so only its owner may read it. One from
the teacher's page holds none: it is restored with the key itself, or sealed anew with a new one.
"""

from __future__ import annotations

import base64
import json
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from sqlalchemy import Column, LargeBinary, Table, insert, select

from tilewise._atomic import atomic_writer
from tilewise._files import convert_read_errors, open_input
from tilewise.errors import ConfigurationError, FileFormatError, Rejected, TilewiseError
from tilewise_arena.board import schema
from tilewise_arena.board.chain import Link, board_key, check_chain, seal_of
from tilewise_arena.board.store import Board, open_board
from tilewise_arena.board.transactions import job_seal
from tilewise_arena.board.verify import LedgerReplay, verify

FORMAT = "tilewise board 1"
_MOST_BYTES, _MOST_LINE = 16 << 30, 64 << 20
_TABLES = {"link": schema.ledger, "file": schema.files, "token": schema.tokens, "job": schema.jobs}


def backup_lines(board: Board, with_key: bool = False) -> Iterator[str]:
    """Yield the lines of a backup of the board; `with_key` includes the key that seals its ledger."""
    head: dict[str, Any] = {"format": FORMAT}
    if with_key and board.key is not None:
        head["key"] = board.key.hex()
    yield json.dumps(head)
    with board.snapshot() as connection:
        for kind, table in _TABLES.items():
            query = select(table).order_by(*table.primary_key).execution_options(yield_per=500)
            for row in connection.execute(query):
                yield json.dumps({kind: dict(row._mapping)}, default=lambda content: base64.b64encode(content).decode())


def back_up(board: Board, path: Path) -> int:
    """Write a backup atomically, readable by its owner only; return the number of lines."""
    count = 0
    with atomic_writer(path, private=True) as stream:
        for line in backup_lines(board, with_key=True):
            stream.write(line.encode() + b"\n")
            count += 1
    return count


def restore(path: Path, where: str | Path, key: Path | None = None, new_key: bool = False) -> int:
    """Create a board from the backup at `path`; return the number of ledger links.

    The backup is restored into a temporary board and verified there; nothing of a refused one is left behind. A backup
    without a key needs the one in the file `key`; `new_key` seals every link anew instead.
    """
    with open_input(path, _MOST_BYTES) as stream, convert_read_errors(path):
        rows = _parse_backup(stream, path)
    links = [Link(**row) for row in rows["link"]]
    secret = _sealing_key(rows.pop("key", None), key, new_key)
    if new_key:
        links = [replace(link, seal=seal_of(secret, link.hash)) for link in links]
    count, _, faults = check_chain(links, secret)
    if faults:
        raise Rejected("altered board", f"{path} does not hold a whole board: {faults[0]}")
    for job in rows["job"]:
        if new_key:  # nothing proves its counts, so it starts anew
            job |= {"attempts": 0, "turn": 0, "seal": job_seal(secret, job["entry"], job["state"], 0, 0)}
    with (
        tempfile.TemporaryDirectory(prefix="tilewise-restore-") as folder,
        _open_empty_board(Path(folder) / "board.sqlite", None, secret) as board,
    ):
        _fill_board(board, rows, links, path)
        verdict = verify(board)
    if not verdict.good:
        raise Rejected("altered board", f"{path} does not hold a whole board: {verdict.faults[0]}")
    with _open_empty_board(where, key, secret) as board:
        _fill_board(board, rows, links, path)
    return count


def _fill_board(board: Board, rows: dict[str, Any], links: list[Link], path: Path) -> None:
    """Write the ledger `links` and the other tables' `rows` of a backup into an empty board."""
    replay = LedgerReplay()
    for link in links:
        replay.take(link)
    if replay.faults:
        raise Rejected("altered board", replay.faults[0])
    events = [{"name": name, "open": is_open} for name, is_open in replay.events.items()]
    tables = {schema.ledger: map(vars, links), schema.entries: replay.rows.values(), schema.events: events}
    tables |= {_TABLES[kind]: rows[kind] for kind in ("file", "token", "job")}
    try:
        with board.write() as transaction:
            for table, contents in tables.items():
                for row in contents:
                    transaction.connection.execute(insert(table).values(**row))
    except (ValueError, OverflowError, KeyError) as error:
        if isinstance(error, TilewiseError):
            raise
        raise FileFormatError(f"{path} does not hold a board: {type(error).__name__}") from None


def _sealing_key(stored_key: bytes | None, key: Path | None, new_key: bool) -> bytes:
    """Return the key that seals the restored board: a new one, the backup's, or the one in a key file."""
    if new_key:
        return secrets.token_bytes(32)
    if stored_key:
        return stored_key
    secret = None if key is None else board_key(key, create=False)
    if secret is None:
        raise ConfigurationError(
            "this backup holds no key (those of the teacher's page never do): name the board's key file with --key, or "
            "say --new-key to seal the restored board with a new one"
        )
    return secret


def _open_empty_board(where: str | Path, key: Path | None, secret: bytes) -> Board:
    """Open the board at `where`, sealed by `secret`, to restore into; raise if it has entries."""
    board = open_board(where, key=key)
    if board.head()[0]:
        board.close()
        raise ConfigurationError("a backup is restored into an empty board, and this one is already in use")
    board.key = secret
    board.write_key()
    return board


def _parse_backup(stream: IO[bytes], path: Path) -> dict[str, Any]:
    """Parse a backup file into its key and the rows of each table."""
    rows: dict[str, Any] = {kind: [] for kind in _TABLES}
    try:
        head = json.loads(stream.readline(_MOST_LINE))
        if head.get("format") != FORMAT:
            raise ValueError
        rows["key"] = bytes.fromhex(head["key"]) if head.get("key") else None
        while line := stream.readline(_MOST_LINE):
            ((kind, row),) = json.loads(line).items()
            rows[kind].append(_decode_row(row, _TABLES[kind]))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise FileFormatError(f"{path} is not a backup of a board, or it is cut short") from None
    return rows


def _decode_row(row: Any, table: Table) -> dict[str, Any]:
    """Decode a row of a backup; raise `FileFormatError` unless it has the columns of its table."""
    if not isinstance(row, dict) or row.keys() != set(table.columns.keys()):
        raise ValueError
    for column in table.columns:
        if not _is_valid_for(row[column.name], column):
            raise ValueError
        if isinstance(column.type, LargeBinary):
            row[column.name] = base64.b64decode(row[column.name])
    return row


def _is_valid_for(value: Any, column: Column[Any]) -> bool:
    """Tell whether a value of a backup, in which bytes are base64, is valid for a column."""
    if value is None:
        return bool(column.nullable)
    kind = str if isinstance(column.type, LargeBinary) else column.type.python_type
    return type(value) is kind and not (isinstance(value, int) and abs(value) >= 1 << 31)
