"""Is the board what it was? The chain is walked, and what follows from it is compared with every other table.

Entries and events as the pages show them, tokens with their teams and roles, the queue, and every stored file: by its
hash, and that none is missing which a submission names.
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
from tilewise_arena.board.store import Board
from tilewise_arena.board.transactions import entry_row, fresh_columns, result_columns

_MOST_FAULTS = 10


@dataclass(frozen=True)
class Verdict:
    """What a verification found; `faults` is empty where all is well."""

    links: int
    head: str
    entries: int
    sealed: bool  # whether the seals could be checked, which needs the board's key
    faults: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.faults

    def as_dict(self) -> dict[str, Any]:
        return vars(self) | {"good": self.good}


def verify(board: Board, head: str | None = None) -> Verdict:
    """Check chain, seals and derived tables. `head` is a hash noted earlier, such as a receipt's: it must be there."""
    replay = Replay()
    seen = {"head": head is None}

    def watched(connection: Connection) -> Iterator[Link]:
        for link in board.links(connection):
            seen["head"] = seen["head"] or link.hash == head
            replay.take(link)
            yield link

    with board.snapshot() as connection:  # ledger and tables of one moment, on a board that is in use
        count, last, faults = check_chain(watched(connection), board.key)
        faults += replay.faults
        if not seen["head"]:
            faults.append(f"the link {head} is not on this board: it was cut off or replaced")
        if not faults:
            faults += _compare(connection, replay)
    return Verdict(count, last, len(replay.rows), board.key is not None, faults[:_MOST_FAULTS])


class Replay:
    """The tables as the ledger says they must be."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self.digests: set[str] = set()
        self.events: dict[str, bool] = {}
        self.tokens: dict[str, dict[str, Any]] = {}
        self.pending: set[int] = set()  # entries that must be in the queue
        self.named: dict[str, int] = {}  # files that submissions name, with the first entry that does
        self.faults: list[str] = []

    def take(self, link: Link) -> None:
        try:
            getattr(self, f"_{link.kind}", self._other)(link, json.loads(link.body))
        except (ValueError, KeyError, TypeError):
            self.faults.append(f"link {link.seq} does not hold what a {link.kind[:20]} holds")

    def _other(self, link: Link, body: dict[str, Any]) -> None:
        self.faults.append(f"link {link.seq} is of the unknown kind {link.kind[:20]!r}")

    def _token(self, _: Link, body: dict[str, Any]) -> None:
        if body["action"] == "revoked":
            self.tokens[body["id"]]["revoked"] = True
        else:
            told = {name: body[name] for name in ("team", "role", "hash") if name in body}
            self.tokens[body["id"]] = told | {"revoked": False}

    def _event(self, _: Link, body: dict[str, Any]) -> None:
        self.events[str(body["event"])] = bool(body["open"])

    def _submission(self, link: Link, body: dict[str, Any]) -> None:
        if body["digest"] in self.digests:
            self.faults.append(f"link {link.seq} repeats an earlier submission")
        self.digests.add(body["digest"])
        status = "unverified" if body["division"] == "open" else "queued"
        row = entry_row(link, body, status)
        number = row["id"]
        if number in self.rows:
            self.faults.append(f"link {link.seq} takes the number of entry {number}")
        self.rows[number] = row
        for digest in (*body["files"].values(), *([body["plugin"]] if body.get("plugin") else [])):
            self.named.setdefault(digest, number)
        if body["division"] == "closed":
            self.pending.add(number)

    def _result(self, _: Link, body: dict[str, Any]) -> None:
        self.rows[body["entry"]].update(result_columns(body))
        self.pending.discard(body["entry"])

    def _rerun(self, _: Link, body: dict[str, Any]) -> None:
        self.rows[body["entry"]]  # it must be there
        self.pending.add(body["entry"])

    def _reinstated(self, _: Link, body: dict[str, Any]) -> None:
        row = self.rows[body["entry"]]
        row.update(fresh_columns(row["division"]))
        if row["division"] == "closed":
            self.pending.add(body["entry"])

    def _record(self, _: Link, body: dict[str, Any]) -> None:
        row = self.rows[body["entry"]]
        for other in self.rows.values():
            if (other["event"], other["division"]) == (row["event"], row["division"]):
                other["record"] = False
        row["record"] = True

    def _disqualified(self, _: Link, body: dict[str, Any]) -> None:
        self.rows[body["entry"]].update(status="disqualified", reason=body["reason"], record=False)
        self.pending.discard(body["entry"])


def _compare(connection: Connection, replay: Replay) -> list[str]:
    faults = []
    if {str(row.name): bool(row.open) for row in connection.execute(select(schema.events))} != replay.events:
        faults.append("an event is shown open or closed where the ledger says otherwise")
    shown = {int(row.id): dict(row._mapping) for row in connection.execute(select(schema.entries))}
    faults += _entry_faults(shown, replay) + _token_faults(connection, replay)
    return faults + _job_faults(connection, replay) + _file_faults(connection, replay)


def _entry_faults(shown: dict[int, dict[str, Any]], replay: Replay) -> list[str]:
    faults = []
    for number in sorted(shown.keys() ^ replay.rows.keys()):
        where = "on the board but not in the ledger" if number in shown else "in the ledger but not on the board"
        faults.append(f"entry {number} is {where}")
    for number, row in replay.rows.items():
        differing = [name for name, value in row.items() if shown.get(number, row)[name] != value]
        if differing:
            faults.append(f"entry {number} shows another {differing[0]} than the ledger has")
    return faults


def _token_faults(connection: Connection, replay: Replay) -> list[str]:
    faults, seen = [], set()
    for row in connection.execute(select(schema.tokens)):
        seen.add(str(row.id))
        told = replay.tokens.get(str(row.id))
        if told is None:
            faults.append(f"token {row.id} is on the board but not in the ledger")
            continue
        has = {"team": row.team, "role": row.role, "hash": row.hash, "revoked": row.revoked_at is not None}
        differing = [name for name, value in told.items() if has[name] != value]
        if differing:
            faults.append(f"token {row.id} has another {differing[0]} than the ledger says")
    return faults + [
        f"token {name} is in the ledger but not on the board" for name in sorted(replay.tokens.keys() - seen)
    ]


def _job_faults(connection: Connection, replay: Replay) -> list[str]:
    jobs = schema.jobs
    queued = {int(row.entry) for row in connection.execute(select(jobs.c.entry).where(jobs.c.state != "done"))}
    lost, odd = replay.pending - queued, queued - replay.pending
    faults = [f"entry {number} should wait for its run, and the queue does not have it" for number in sorted(lost)]
    return faults + [f"entry {number} is in the queue, and the ledger does not say why" for number in sorted(odd)]


def _file_faults(connection: Connection, replay: Replay) -> list[str]:
    faults, seen = [], set()
    for row in connection.execution_options(yield_per=8).execute(select(schema.files)):
        seen.add(str(row.digest))
        content = row.content if isinstance(row.content, bytes) else b""
        if hashlib.sha256(content).hexdigest() != row.digest:
            faults.append(f"the stored file {row.digest[:12]}… was altered: its content does not give its hash")
    lost = [number for digest, number in replay.named.items() if digest not in seen]
    return faults + [f"a file of entry {number} is missing" for number in sorted(lost)]
