"""Is the board what it was? The chain is walked, and what follows from it is compared with what the pages show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select

from tilewise.bench.board import schema
from tilewise.bench.board.chain import Link, check_chain
from tilewise.bench.board.store import Board
from tilewise.bench.board.transactions import entry_row, result_columns

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

    def watched() -> Iterator[Link]:
        for link in board.links():
            seen["head"] = seen["head"] or link.hash == head
            replay.take(link)
            yield link

    count, last, faults = check_chain(watched(), board.key)
    faults += replay.faults
    if not seen["head"]:
        faults.append(f"the link {head} is not on this board: it was cut off or replaced")
    if not faults:
        faults += _compare(board, replay)
    return Verdict(count, last, len(replay.rows), board.key is not None, faults[:_MOST_FAULTS])


class Replay:
    """The tables as the ledger says they must be."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self.digests: set[str] = set()
        self.events: dict[str, bool] = {}
        self.faults: list[str] = []

    def take(self, link: Link) -> None:
        try:
            getattr(self, f"_{link.kind}", self._other)(link, json.loads(link.body))
        except (ValueError, KeyError, TypeError):
            self.faults.append(f"link {link.seq} does not hold what a {link.kind[:20]} holds")

    def _other(self, link: Link, body: dict[str, Any]) -> None:
        if link.kind != "token":
            self.faults.append(f"link {link.seq} is of the unknown kind {link.kind[:20]!r}")

    def _event(self, _: Link, body: dict[str, Any]) -> None:
        self.events[str(body["event"])] = bool(body["open"])

    def _submission(self, link: Link, body: dict[str, Any]) -> None:
        if body["digest"] in self.digests:
            self.faults.append(f"link {link.seq} repeats an earlier submission")
        self.digests.add(body["digest"])
        status = "unverified" if body["division"] == "open" else "queued"
        self.rows[link.seq] = entry_row(link.seq, link.at, body, status)

    def _result(self, _: Link, body: dict[str, Any]) -> None:
        self.rows[body["entry"]].update(result_columns(body))

    def _record(self, _: Link, body: dict[str, Any]) -> None:
        row = self.rows[body["entry"]]
        for other in self.rows.values():
            if (other["event"], other["division"]) == (row["event"], row["division"]):
                other["record"] = False
        row["record"] = True

    def _disqualified(self, _: Link, body: dict[str, Any]) -> None:
        self.rows[body["entry"]].update(status="disqualified", reason=body["reason"], record=False)


def _compare(board: Board, replay: Replay) -> list[str]:
    faults = []
    if board.open_events() != replay.events:
        faults.append("an event is shown open or closed where the ledger says otherwise")
    with board.read() as connection:
        shown = {int(row.id): dict(row._mapping) for row in connection.execute(select(schema.entries))}
    for number in sorted(shown.keys() ^ replay.rows.keys()):
        where = "on the board but not in the ledger" if number in shown else "in the ledger but not on the board"
        faults.append(f"entry {number} is {where}")
    for number, row in replay.rows.items():
        differing = [name for name, value in row.items() if shown.get(number, row)[name] != value]
        if differing:
            faults.append(f"entry {number} shows another {differing[0]} than the ledger has")
    return faults
