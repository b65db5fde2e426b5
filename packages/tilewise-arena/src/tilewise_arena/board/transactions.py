"""Changes of a board: each one adds a link to the ledger and updates the tables that are derived from it.

A `BoardTransaction` lasts for one `with board.write()` block; all its changes are committed together or not at all.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, insert, select, update

from tilewise.bench.events import TinyMLPerf
from tilewise.bench.jsontext import canonical, plain_value
from tilewise.bench.recipe import Recipe, parse_recipe
from tilewise.bench.scoring import check_consistent
from tilewise.errors import ConfigurationError, FileFormatError, Rejected, UnavailableError
from tilewise_arena.board import schema
from tilewise_arena.board.chain import FIRST, Link, make_link, row_seal, seal_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

DIVISIONS = ("closed", "open")
OUTCOMES = ("scored", "rejected", "noisy")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class BoardTransaction:
    """Changes to a board that are committed together."""

    def __init__(self, connection: Connection, key: bytes) -> None:
        """Continue the ledger after its last link; raise unless `key` sealed that one."""
        self.connection, self._key = connection, key
        table = schema.ledger
        last = connection.execute(
            select(table.c.seq, table.c.hash, table.c.seal).order_by(table.c.seq.desc()).limit(1)
        ).first()
        self._seq, self._head = (0, FIRST) if last is None else (int(last.seq), str(last.hash))
        if last is not None and not hmac.compare_digest(str(last.seal), seal_of(key, self._head)):
            raise UnavailableError(
                "this key is not the one that sealed the board so far, so nothing is added with it: give the board's "
                "own key (--key, or TILEWISE_BOARD_KEY)"
            )

    @contextmanager
    def part(self) -> Iterator[None]:
        """Open a savepoint: if the block raises, only its changes are rolled back."""
        seq, head = self._seq, self._head
        try:
            with self.connection.begin_nested():
                yield
        except BaseException:
            self._seq, self._head = seq, head
            raise

    def _append(self, kind: str, body: dict[str, Any]) -> Link:
        """Append a sealed link to the ledger and return it."""
        link = make_link(self._key, self._seq + 1, now(), kind, body, self._head)
        self.connection.execute(insert(schema.ledger).values(**vars(link)))
        self._seq, self._head = link.seq, link.hash
        return link

    # --- entries ---

    def submit(
        self,
        team: str,
        recipe: Mapping[str, Any],
        files: Mapping[str, bytes] | None = None,
        division: str = "closed",
        plugin: bytes | None = None,
        queue: bool = True,
    ) -> dict[str, Any]:
        """Add an entry from a valid recipe, or a plugin in the open division, and return its receipt.

        With `queue` it waits for a worker to measure it.
        """
        files = dict(files or {})
        event = str(recipe["event"])
        if not self.is_open(event):
            raise Rejected("event closed", f"{event} is closed for new entries")
        body = self._submission(team, recipe, files, division, plugin)
        earlier_entry = self.connection.execute(
            select(schema.entries.c.id).where(schema.entries.c.digest == body["digest"])
        ).scalar()
        if earlier_entry is not None:
            raise Replayed(int(earlier_entry))
        new_bytes = sum(self._keep_file(content) for content in [*files.values(), *([plugin] if plugin else [])])
        body["bytes"] = new_bytes + len(canonical(body["recipe"]))
        body["entry"] = number = self._next_number()
        link = self._append("submission", body)
        row = entry_row(link, body)
        self.connection.execute(insert(schema.entries).values(**row))
        if queue and division == "closed":
            self._queue(number)
        return {"entry": number, "hash": link.hash, "at": link.at, "status": row["status"]}

    def _next_number(self) -> int:
        """Return the number of the next entry; entries are numbered from 1, independently of the ledger's links."""
        return int(self.connection.execute(select(func.max(schema.entries.c.id))).scalar() or 0) + 1

    def _submission(
        self, team: str, recipe: Mapping[str, Any], files: Mapping[str, bytes], division: str, plugin: bytes | None
    ) -> dict[str, Any]:
        """Build the ledger's record of a submission: recipe, SHA-256 of files and plugin, and a digest of all."""
        if division not in DIVISIONS:
            raise Rejected("schema", f"a division is {' or '.join(DIVISIONS)}")
        body: dict[str, Any] = {"team": team, "event": str(recipe["event"]), "division": division}
        body |= {"recipe": dict(recipe), "files": {n: sha256(c) for n, c in sorted(files.items())}}
        body["plugin"] = sha256(plugin) if plugin else ""
        return body | {"digest": sha256(canonical(_content_identity(body)))}

    def _keep_file(self, content: bytes) -> int:
        """Store a file's content unless it is stored already; return the bytes added."""
        digest = sha256(content)
        table = schema.files
        if self.connection.execute(select(table.c.digest).where(table.c.digest == digest)).scalar() is not None:
            return 0
        self.connection.execute(insert(table).values(digest=digest, content=content))
        return len(content)

    def result(self, entry: int, outcome: str, facts: Mapping[str, Any] | None, reason: str = "") -> None:
        """Store the outcome of an entry's run and its figures; ignored if the entry is disqualified."""
        row = self._get_entry(entry)
        self._end_job(entry)
        if row.status == "disqualified":
            return
        if outcome not in OUTCOMES:
            raise ConfigurationError(f"an outcome is one of {', '.join(OUTCOMES)}")
        if outcome == "scored":
            check_consistent(dict(facts or {}))
        body: dict[str, Any] = {"entry": entry, "outcome": outcome, "reason": reason}
        body["result"] = json.loads(json.dumps(facts, default=plain_value)) if outcome == "scored" else None
        self._append("result", body)
        self._update_entry(entry, **result_columns(body))

    def record(self, entry: int, p_value: float, factor: float, previous: int | None) -> None:
        """Mark an entry as the record of its event; `factor` is its lead over the `previous` record's entry."""
        row = self._get_entry(entry)
        if row.status != "scored":
            raise Rejected("no record", f"entry {entry} is {row.status}, and only a scored one holds a record")
        if previous is not None and not p_value < 0.01:
            raise Rejected("no record", f"a record must be beaten at p < 0.01, not {p_value:.3g}")
        body = {"entry": entry, "p_value": p_value, "factor": factor, "previous": previous}
        self._append("record", body | {"event": row.event, "division": row.division})
        table = schema.entries
        holders = (table.c.event == row.event) & (table.c.division == row.division) & table.c.record
        self.connection.execute(update(table).where(holders).values(record=False))
        self._update_entry(entry, record=True)

    def disqualify(self, entry: int, reason: str, by: str = "") -> None:
        """Remove an entry from the ranking until it is reinstated; the entry and the reason stay visible."""
        self._get_entry(entry)
        if not 3 <= len(reason.strip()) <= 300 or not reason.isprintable():
            raise ConfigurationError("a disqualification needs a reason of 3 to 300 printable characters")
        self._append("disqualified", {"entry": entry, "reason": reason} | _author_field(by))
        self._update_entry(entry, status="disqualified", reason=reason, record=False)
        self._end_job(entry)

    def reinstate(self, entry: int, by: str = "") -> None:
        """Lift a disqualification: the entry is as it was submitted, and waits to be measured again."""
        row = self._get_entry(entry)
        if row.status != "disqualified":
            raise ConfigurationError(f"entry {entry} is not disqualified")
        self._append("reinstated", {"entry": entry} | _author_field(by))
        self._update_entry(entry, **fresh_columns(row.division))
        if row.division == "closed":
            self._queue(entry)

    def requeue(self, entry: int, by: str = "") -> None:
        """Queue an entry for another run."""
        row = self._get_entry(entry)
        if row.division != "closed":
            raise ConfigurationError("an entry of the open division is re-run by hand: tilewise compete rerun")
        if row.status == "disqualified":
            raise ConfigurationError(
                f"entry {entry} is disqualified: lift the disqualification first, and it runs again"
            )
        self._append("rerun", {"entry": entry} | _author_field(by))
        self._queue(entry)

    def _queue(self, entry: int) -> None:
        self._write_job(entry, state="queued", attempts=0, worker="", beat=0)

    def _end_job(self, entry: int) -> None:
        if self._job(entry) is not None:
            self._write_job(entry, state="done")

    def _job(self, entry: int) -> Any:
        return self.connection.execute(select(schema.jobs).where(schema.jobs.c.entry == entry)).first()

    def _write_job(self, entry: int, **changes: Any) -> None:
        """Insert or update an entry's job, and seal the columns that decide when it runs."""
        job = self._job(entry)
        stored: dict[str, Any] = {"attempts": 0, "turn": 0} if job is None else dict(job._mapping)
        values = stored | changes
        values["seal"] = job_seal(self._key, entry, values["state"], values["attempts"], values["turn"])
        if job is None:
            self.connection.execute(insert(schema.jobs).values(entry=entry, **values))
        else:
            self.connection.execute(update(schema.jobs).where(schema.jobs.c.entry == entry).values(**values))

    def _get_entry(self, entry_id: int) -> Any:
        """Return the row of an entry; raise ConfigurationError if the board does not have it."""
        row = self.connection.execute(select(schema.entries).where(schema.entries.c.id == entry_id)).first()
        if row is None:
            raise ConfigurationError(f"there is no entry {entry_id} on this board")
        return row

    def _update_entry(self, entry: int, **columns: Any) -> None:
        self.connection.execute(update(schema.entries).where(schema.entries.c.id == entry).values(**columns))

    # --- events ---

    def is_open(self, event: str) -> bool:
        is_open = self.connection.execute(select(schema.events.c.open).where(schema.events.c.name == event)).scalar()
        return is_open is None or bool(is_open)

    def set_open(self, event: str, is_open: bool, by: str = "") -> None:
        """Open or close an event for new entries."""
        name = TinyMLPerf.event(event).name
        self._append("event", {"event": name, "open": is_open} | _author_field(by))
        table = schema.events
        if not self.connection.execute(update(table).where(table.c.name == name).values(open=is_open)).rowcount:
            self.connection.execute(insert(table).values(name=name, open=is_open))

    # --- tokens ---

    def add_token(self, identifier: str, digest: str, team: str, role: str, by: str = "") -> None:
        """Store a new token of a team: its public name `identifier`, hash `digest`, and role."""
        body = {"id": identifier, "team": team, "role": role, "action": "created", "hash": digest}
        link = self._append("token", body | _author_field(by))
        row = {"id": identifier, "hash": digest, "team": team, "role": role, "created_at": link.at, "revoked_at": None}
        self.connection.execute(insert(schema.tokens).values(**row))

    def revoke_token(self, identifier: str, by: str = "") -> None:
        """Revoke a token; raise ConfigurationError if it does not exist or is revoked."""
        table = schema.tokens
        unrevoked = (table.c.id == identifier) & table.c.revoked_at.is_(None)
        if not self.connection.execute(update(table).where(unrevoked).values(revoked_at=now())).rowcount:
            raise ConfigurationError(f"there is no token {identifier[:20]!r} that could be revoked")
        self._append("token", {"id": identifier, "action": "revoked"} | _author_field(by))

    # --- the queue ---

    def claim_job(self, worker: str, most_attempts: int, abandoned: Mapping[int, int] | None = None) -> int | None:
        """Claim the next entry to measure for `worker` and return its id; None if there is none.

        `abandoned` maps running entries to heartbeats that have not changed for too long: these entries may be claimed,
        unless their heartbeat has changed since. An entry runs at most `most_attempts` times.
        """
        jobs = schema.jobs
        free = jobs.c.state == "queued"
        for entry, beat in (abandoned or {}).items():
            free |= (jobs.c.state == "running") & (jobs.c.entry == entry) & (jobs.c.beat == beat)
        query = self._fair_order(select(jobs.c.entry, jobs.c.attempts, jobs.c.beat).where(free)).limit(1)
        while (job := self.connection.execute(query).first()) is not None:
            entry = int(job.entry)
            if self._get_entry(entry).status == "disqualified":
                self._end_job(entry)
            elif job.attempts >= most_attempts:
                sentence = f"not scored: its run was ended {most_attempts} times; the teacher can have it run again"
                self.result(entry, "noisy", None, sentence)
            else:
                values = {"state": "running", "attempts": job.attempts + 1, "beat": job.beat + 1, "worker": worker}
                values["turn"] = 1 + int(self.connection.execute(select(func.max(jobs.c.turn))).scalar() or 0)
                self._write_job(entry, **values)
                return entry
        return None

    @staticmethod
    def _fair_order(query: Any) -> Any:
        """Order jobs fairly: the team whose last job started longest ago first, then the earliest entry."""
        jobs, entries = schema.jobs, schema.entries
        others, of = jobs.alias(), entries.alias()
        last = select(of.c.team, func.max(others.c.turn).label("turn")).join(others, others.c.entry == of.c.id)
        teams_waiting = select(entries.c.team).join(jobs, jobs.c.entry == entries.c.id).where(jobs.c.state != "done")
        turns = last.where(others.c.turn > 0, of.c.team.in_(teams_waiting)).group_by(of.c.team).subquery()
        joined = query.join(entries, entries.c.id == jobs.c.entry).outerjoin(turns, turns.c.team == entries.c.team)
        return joined.order_by(func.coalesce(turns.c.turn, 0), jobs.c.entry)

    def beat(self, worker: str) -> None:
        """Increment the heartbeat of a worker's job, which shows that it is still running."""
        jobs = schema.jobs
        mine = (jobs.c.state == "running") & (jobs.c.worker == worker)
        self.connection.execute(update(jobs).where(mine).values(beat=jobs.c.beat + 1))

    def holds(self, worker: str, entry: int) -> bool:
        """Tell whether a worker still has the job of measuring an entry."""
        jobs = schema.jobs
        mine = (jobs.c.entry == entry) & (jobs.c.state == "running") & (jobs.c.worker == worker)
        return self.connection.execute(select(jobs.c.entry).where(mine)).first() is not None

    def release(self, worker: str, counts: bool = True) -> None:
        """Put a worker's job back into the queue; without `counts`, the attempt is not counted."""
        jobs = schema.jobs
        mine = (jobs.c.state == "running") & (jobs.c.worker == worker)
        for job in self.connection.execute(select(jobs).where(mine)).all():
            attempts = job.attempts if counts else job.attempts - 1
            self._write_job(int(job.entry), state="queued", worker="", attempts=attempts)

    def queued_of(self, team: str) -> int:
        """Count the entries of a team that wait for a run, by a worker or by the teacher."""
        return self._of_entries(func.count(), team, schema.entries.c.status.in_(("queued", "unverified")))

    def stored_by(self, team: str) -> int:
        """Return the bytes that a team's entries have added to the database."""
        return self._of_entries(func.sum(schema.entries.c.bytes), team)

    def entered_since(self, team: str, event: str, at: str) -> int:
        """Count the entries of a team in an event since a time."""
        table = schema.entries
        return self._of_entries(func.count(), team, table.c.event == event, table.c.submitted_at >= at)

    def _of_entries(self, value: Any, team: str, *conditions: Any) -> int:
        """Return an SQL aggregate, such as count(), over a team's entries; 0 for NULL."""
        table = schema.entries
        query = select(value).select_from(table).where(table.c.team == team, *conditions)
        return int(self.connection.execute(query).scalar() or 0)


class Replayed(Rejected):
    """Raised for a submission that is on the board already."""

    def __init__(self, entry: int) -> None:
        super().__init__("replayed", f"this submission is on the board already, as entry {entry}")
        self.facts = {"entry": entry}


def job_seal(key: bytes, entry: int, state: str, attempts: int, turn: int) -> str:
    """Return the seal of a job's columns that decide when it runs; its worker and heartbeat are not covered."""
    return row_seal(key, "jobs", int(entry), str(state), int(attempts), int(turn))


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def entry_row(link: Link, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `entries` row of a submission recorded in the ledger."""
    recipe = body["recipe"]
    row = {name: body[name] for name in ("team", "event", "division", "digest")}
    row |= {"id": int(body["entry"]), "link": link.seq, "submitted_at": link.at, "bytes": int(body["bytes"])}
    row |= {"name": str(recipe.get("name", "")), "recipe": canonical(recipe).decode()}
    return row | fresh_columns(body["division"])


def result_columns(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of an `entries` row that a result sets."""
    result = body["result"]
    text = None if result is None else canonical(result).decode()
    score = None if result is None else float(result["score"])
    scored = body["outcome"] == "scored"
    return {"status": body["outcome"], "reason": body["reason"], "result": text, "score": score, "verified": scored}


def _content_identity(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what identifies an entry's content, without its name: a renamed entry is not a new one."""
    recipe = {name: value for name, value in body["recipe"].items() if name not in ("name", "predictions")}
    steps = [{k: v for k, v in step.items() if k != "file"} for step in recipe.get("steps", [])]
    return {**body, "recipe": recipe | {"steps": steps}, "files": sorted(body["files"].values())}


def fresh_columns(division: str) -> dict[str, Any]:
    """Return the columns of an `entries` row that has not been measured yet."""
    status = "unverified" if division == "open" else "queued"
    return {"status": status, "reason": "", "score": None, "result": None, "verified": False, "record": False}


def _author_field(by: str) -> dict[str, str]:
    """Return {"by": author} for the ledger, the author being a token or the command line; {} if unknown."""
    return {"by": by} if by else {}


def recipe_of(row: Any) -> Recipe:
    """Parse the recipe of a row of the entries table; raise `FileFormatError` if it is damaged."""
    recipe = json.loads(row.recipe)
    if not isinstance(recipe, dict):
        raise FileFormatError(f"the board's entry {row.id} has no recipe; the file is damaged")
    return parse_recipe(recipe)
