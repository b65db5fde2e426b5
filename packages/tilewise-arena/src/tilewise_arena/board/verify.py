"""Verification of a board: replays the ledger's chain, and compares the result with all other tables.

The comparison covers entries, events, tokens with their teams and roles, the queue, sessions, and every stored file:
its hash, and that no file of a submission is missing. Jobs and sessions are not in the ledger; each row has a seal that
needs the board's key. Triggers, views, rules and indexes that no board has are faults. `NOT_COVERED` lists the rest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, select

from tilewise_arena.board import schema
from tilewise_arena.board.chain import Link, check_chain
from tilewise_arena.board.sessions import session_seal
from tilewise_arena.board.store import Board
from tilewise_arena.board.transactions import entry_row, fresh_columns, job_seal, result_columns

_MOST_FAULTS = 10
NOT_COVERED = (
    "links cut off the end of the ledger together with what follows from them, unless --head names one of them",
    "when a token was revoked (that it was is covered)",
    "which worker runs an entry, and its beat",
    "rows of the queue or sessions that were deleted or set back to an earlier state of theirs",
    "files that no entry names",
)


@dataclass(frozen=True)
class BoardVerification:
    """The result of a verification; `faults` is empty if the board is intact."""

    links: int
    head: str
    entries: int
    sealed: bool  # whether the seals could be checked, which needs the board's key
    faults: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.faults

    def as_dict(self) -> dict[str, Any]:
        return vars(self) | {"good": self.good, "not_covered": list(NOT_COVERED)}


def verify(board: Board, head: str | None = None) -> BoardVerification:
    """Check the ledger's chain and seals, and the derived tables; `head` is a link's hash that must occur."""
    replay = LedgerReplay()
    head_exists = head is None

    def replay_links(connection: Connection) -> Iterator[Link]:
        """Yield all links after applying each one to the replay."""
        nonlocal head_exists
        for link in board.links(connection):
            head_exists = head_exists or link.hash == head
            replay.take(link)
            yield link

    with board.snapshot() as connection:  # a consistent view of ledger and tables while others write
        count, last, faults = check_chain(replay_links(connection), board.key)
        faults += replay.faults
        if not head_exists:
            faults.append(f"the link {head} is not on this board: it was cut off or replaced")
        if not faults:
            faults += _compare(connection, replay, board.key)
    return BoardVerification(count, last, len(replay.rows), board.key is not None, faults[:_MOST_FAULTS])


class LedgerReplay:
    """Rebuilds the board's tables from the links of its ledger."""

    def __init__(self) -> None:
        """Start with the empty tables of a new board."""
        self.rows: dict[int, dict[str, Any]] = {}
        self.digests: set[str] = set()
        self.events: dict[str, bool] = {}
        self.tokens: dict[str, dict[str, Any]] = {}
        self.pending: set[int] = set()  # entries that must be in the queue
        self.file_entries: dict[str, int] = {}  # digest of a file -> the first entry that uses it
        self.faults: list[str] = []

    def take(self, link: Link) -> None:
        """Apply one link to the tables; one with an invalid body is recorded as a fault."""
        try:
            getattr(self, f"_{link.kind}", self._other)(link, json.loads(link.body))
        except (ValueError, KeyError, TypeError):
            self.faults.append(f"link {link.seq} does not hold what a {link.kind[:20]} holds")

    def _other(self, link: Link, body: dict[str, Any]) -> None:
        self.faults.append(f"link {link.seq} is of the unknown kind {link.kind[:20]!r}")

    def _token(self, link: Link, body: dict[str, Any]) -> None:
        """Replay a link that issued or revoked a token."""
        if body["action"] == "revoked":
            self.tokens[body["id"]]["revoked"] = True
        else:
            columns = {name: body[name] for name in ("team", "role", "hash") if name in body}
            self.tokens[body["id"]] = columns | {"created_at": link.at, "revoked": False}

    def _event(self, _: Link, body: dict[str, Any]) -> None:
        self.events[str(body["event"])] = bool(body["open"])

    def _submission(self, link: Link, body: dict[str, Any]) -> None:
        """Replay a submission: add the row of its entry."""
        if body["digest"] in self.digests:
            self.faults.append(f"link {link.seq} repeats an earlier submission")
        self.digests.add(body["digest"])
        row = entry_row(link, body)
        number = row["id"]
        if number in self.rows:
            self.faults.append(f"link {link.seq} takes the number of entry {number}")
        self.rows[number] = row
        for digest in (*body["files"].values(), *([body["plugin"]] if body.get("plugin") else [])):
            self.file_entries.setdefault(digest, number)
        if body["division"] == "closed":
            self.pending.add(number)

    def _result(self, _: Link, body: dict[str, Any]) -> None:
        self.rows[body["entry"]].update(result_columns(body))
        self.pending.discard(body["entry"])

    def _rerun(self, _: Link, body: dict[str, Any]) -> None:
        self.rows[body["entry"]]  # it must be there
        self.pending.add(body["entry"])

    def _reinstated(self, _: Link, body: dict[str, Any]) -> None:
        """Replay a reinstatement: the entry is as submitted, and waits for a measurement in the closed division."""
        row = self.rows[body["entry"]]
        row.update(fresh_columns(row["division"]))
        if row["division"] == "closed":
            self.pending.add(body["entry"])

    def _record(self, _: Link, body: dict[str, Any]) -> None:
        """Replay a record: the entry holds it, and no other entry of its event and division does."""
        row = self.rows[body["entry"]]
        for other in self.rows.values():
            if (other["event"], other["division"]) == (row["event"], row["division"]):
                other["record"] = False
        row["record"] = True

    def _disqualified(self, _: Link, body: dict[str, Any]) -> None:
        self.rows[body["entry"]].update(status="disqualified", reason=body["reason"], record=False)
        self.pending.discard(body["entry"])


def _compare(connection: Connection, replay: LedgerReplay, key: bytes | None) -> list[str]:
    """Return descriptions of differences between stored and replayed tables, and of wrong seals."""
    faults = []
    if {str(row.name): bool(row.open) for row in connection.execute(select(schema.events))} != replay.events:
        faults.append("an event is shown open or closed where the ledger says otherwise")
    rows = {int(row.id): dict(row._mapping) for row in connection.execute(select(schema.entries))}
    faults += _entry_faults(rows, replay) + _token_faults(connection, replay)
    faults += _job_faults(connection, replay) + _file_faults(connection, replay)
    objects = schema.foreign_objects(connection)
    faults += [f"the database has a trigger, view, rule or index that no board has: {name[:80]}" for name in objects]
    return faults + (_seal_faults(connection, key) if key is not None else [])


def _entry_faults(rows: dict[int, dict[str, Any]], replay: LedgerReplay) -> list[str]:
    """Return descriptions of differences between the entries table and the replayed ledger."""
    faults = []
    for number in sorted(rows.keys() ^ replay.rows.keys()):
        where = "on the board but not in the ledger" if number in rows else "in the ledger but not on the board"
        faults.append(f"entry {number} is {where}")
    for number, row in replay.rows.items():
        differing = [name for name, value in row.items() if rows.get(number, row)[name] != value]
        if differing:
            faults.append(f"entry {number} shows another {differing[0]} than the ledger has")
    return faults


def _token_faults(connection: Connection, replay: LedgerReplay) -> list[str]:
    """Return descriptions of differences between the tokens table and the replayed ledger."""
    faults, names = [], set()
    for row in connection.execute(select(schema.tokens)):
        names.add(str(row.id))
        expected = replay.tokens.get(str(row.id))
        if expected is None:
            faults.append(f"token {row.id} is on the board but not in the ledger")
            continue
        has = {"team": row.team, "role": row.role, "hash": row.hash, "created_at": row.created_at}
        has["revoked"] = row.revoked_at is not None
        differing = [name for name, value in expected.items() if has[name] != value]
        if differing:
            faults.append(f"token {row.id} has another {differing[0]} than the ledger says")
    return faults + [
        f"token {name} is in the ledger but not on the board" for name in sorted(replay.tokens.keys() - names)
    ]


def _job_faults(connection: Connection, replay: LedgerReplay) -> list[str]:
    """Return descriptions of differences between the queue of jobs and the replayed ledger."""
    jobs = schema.jobs
    in_queue = {int(row.entry) for row in connection.execute(select(jobs.c.entry).where(jobs.c.state != "done"))}
    missing, unexpected = replay.pending - in_queue, in_queue - replay.pending
    faults = [f"entry {number} should wait for its run, and the queue does not have it" for number in sorted(missing)]
    return faults + [
        f"entry {number} is in the queue, and the ledger does not say why" for number in sorted(unexpected)
    ]


def _seal_faults(connection: Connection, key: bytes) -> list[str]:
    """Return descriptions of jobs and sessions with a wrong seal."""
    faults = []
    for job in connection.execute(select(schema.jobs)):
        seal = job_seal(key, job.entry, job.state, job.attempts, job.turn)
        if job.seal != seal or not isinstance(job.beat, int):
            faults.append(f"the job of entry {job.entry} was altered: its attempts or its place in the queue")
    for session in connection.execute(select(schema.sessions)):
        if session.seal != session_seal(key, session.hash, session.token, session.until):
            faults.append(f"a session of token {session.token} was altered: its owner or its end")
    return faults


def _file_faults(connection: Connection, replay: LedgerReplay) -> list[str]:
    """Return descriptions of stored files with a wrong hash, and of files that are missing."""
    faults, digests = [], set()
    for row in connection.execution_options(yield_per=8).execute(select(schema.files)):
        digests.add(str(row.digest))
        content = row.content if isinstance(row.content, bytes) else b""
        if hashlib.sha256(content).hexdigest() != row.digest:
            faults.append(f"the stored file {row.digest[:12]}… was altered: its content does not give its hash")
    missing = [number for digest, number in replay.file_entries.items() if digest not in digests]
    return faults + [f"a file of entry {number} is missing" for number in sorted(missing)]
