"""Access to the board for the routes: authentication, submissions, reading and writing."""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, ParamSpec, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from tilewise.bench.jsontext import parse_json
from tilewise.bench.recipe import MOST_FILE_BYTES, Recipe, parse_recipe
from tilewise.bench.scoring import NO_TRUTH
from tilewise.errors import Rejected
from tilewise.web.health import Pulse
from tilewise.web.limits import HOLDER
from tilewise.web.routes import read_json_text
from tilewise_arena.board import Board, BoardTransaction
from tilewise_arena.board.tokens import Holder, holder_of
from tilewise_arena.sandbox import bubblewrap
from tilewise_arena.server.models import Submission
from tilewise_arena.server.writer import BoardWriter

P = ParamSpec("P")
T = TypeVar("T")
MAX_BODY_BYTES = 12 << 20  # arbitrary: the files of an entry in base64
MOST_STORED = 256 << 20


@dataclass
class Service:
    """The board as the routes use it: authentication, submissions, reading and writing in threads."""

    board: Board
    writer: BoardWriter
    most_queued: int = 100  # entries of one team that may wait for their run
    most_stored: int = MOST_STORED  # bytes that the files and recipes of one team may take
    has_truth: bool = False  # whether the workers have the collection that TILE_OLYMPIAD is scored against
    most_daily: int = 10  # entries of one team in a day, where each answer tells something about the truth
    workers: Callable[[], int] | None = None  # how many measuring processes live, where this server has its own
    _readers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8, "board-reader"))
    # Health is queried in a separate thread, so that busy readers do not make the board look dead.
    _health_thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "board-health"))
    _parsing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))  # large bodies one by one

    def __post_init__(self) -> None:
        self.pulse = Pulse(self._query_health, self._describe_health)

    async def write(self, work: Callable[[BoardTransaction], Any]) -> Any:
        """Run `work` in a transaction of the board and wait for its commit."""
        return await asyncio.wrap_future(self.writer.put(work))

    async def read(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Run a function that reads the board or computes, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, partial(function, *args, **options))

    def _query_health(self) -> asyncio.Future[int]:
        """Count the waiting jobs in the thread for health checks."""
        return asyncio.get_running_loop().run_in_executor(self._health_thread, self.board.waiting)

    def _describe_health(self, waiting: int) -> dict[str, Any]:
        alive = None if self.workers is None else self.workers()
        return {"status": "no worker runs" if alive == 0 else "ok", "waiting": waiting, "workers": alive}

    def close(self) -> None:
        """Finish queued writes, stop the threads, and close the board."""
        self.writer.close()
        for pool in (self._readers, self._health_thread):
            pool.shutdown(wait=False, cancel_futures=True)
        self.board.close()

    async def lookup(self, token: str) -> Holder | None:
        """Return the owner of a token, or None."""
        return await self.read(holder_of, self.board, token)

    async def holder(self, request: Request) -> Holder:
        """Return the owner of the request's token, which `Limits` has looked up."""
        holder: Holder | None = request.scope.get(HOLDER)
        if holder is None:
            raise Rejected("token", "this request needs a valid token: Authorization: Bearer tw_…")
        return holder

    async def visible_entry(self, number: int, holder: Holder | None) -> dict[str, Any] | None:
        """Return an entry; while its event is open, others than its team and the teacher do not see the recipe.

        Otherwise a team could hand in the recipe of another one. The steps of a result name the recipe's steps.
        """
        entry = await self.read(self.board.entry, number)
        if entry is None:
            return None
        is_open = (await self.read(self.board.open_events)).get(entry["event"], True)
        may_see = holder is not None and (holder.is_admin or holder.team == entry["team"])
        if not is_open or may_see:
            return entry
        result = entry["result"] and {**entry["result"], "steps": []}
        return {**entry, "recipe": {}, "result": result}

    async def admin(self, request: Request) -> Holder:
        """Return the owner of the request's token; raise Rejected unless it is a teacher's."""
        holder = await self.holder(request)
        if not holder.is_admin:
            raise Rejected("team", "this needs the teacher's token; a team's is not enough")
        return holder

    async def change_entry(self, action: str, number: int, by: str, reason: str = "") -> str:
        """Disqualify, reinstate or rerun an entry (`action`); return a sentence about it."""
        actions: dict[str, tuple[str, Callable[[BoardTransaction], None]]] = {
            "disqualify": ("disqualified", lambda transaction: transaction.disqualify(number, reason, by)),
            "rerun": ("queued for another run", lambda transaction: transaction.requeue(number, by)),
            "reinstate": ("back, and waiting for a run", lambda transaction: transaction.reinstate(number, by)),
        }
        if action not in actions:
            raise Rejected("schema", "this action does not exist")
        done, work = actions[action]
        await self.write(work)
        return done

    async def body(self, request: Request, model: type[BaseModel]) -> Any:
        """Parse and validate the JSON body of a request as `model`, with a limit on its nesting."""
        text = await read_json_text(request)
        async with self._parsing:
            content = await self.read(parse_json, text, MAX_BODY_BYTES)
        try:
            return model.model_validate(content)
        except ValidationError as error:
            raise Rejected("schema", first_error(error)) from None

    async def enter(self, holder: Holder, submission: Submission) -> dict[str, Any]:
        """Check a team's submission and add it to the board; returns the receipt."""
        if submission.team is not None and submission.team != holder.team:
            raise Rejected("team", "this token belongs to another team than the one in the entry")
        if holder.is_admin:
            raise Rejected("team", "the teacher's token cannot submit entries; create a token for a team")
        recipe, files, plugin = await self.read(checked_submission, submission)
        if submission.division == "open":
            reason = await self.read(bubblewrap.unavailable_reason)
            if reason:
                raise Rejected("event closed", reason)
        if recipe.event.kind == "tiles" and not self.has_truth:
            raise Rejected("event closed", f"this board takes no entries of this event: {NO_TRUTH}")

        def add_entry(transaction: BoardTransaction) -> dict[str, Any]:
            self._check_room(transaction, holder.team, recipe, sum(map(len, files.values())) + len(plugin or b""))
            return transaction.submit(holder.team, recipe.as_dict(), files, submission.division, plugin)

        receipt: dict[str, Any] = await self.write(add_entry)
        return receipt

    def _check_room(self, transaction: BoardTransaction, team: str, recipe: Recipe, more_bytes: int) -> None:
        """Reject an entry of a team that has too many waiting entries, entries today, or stored bytes."""
        if transaction.stored_by(team) + more_bytes > self.most_stored:
            most = f"{self.most_stored / (1 << 20):,.0f} MiB"
            raise Rejected("room", f"the files of {team} would exceed the {most} that a team may store here")
        if transaction.queued_of(team) >= self.most_queued:
            raise Rejected(
                "queue", f"{self.most_queued} entries of {team} are waiting already; submit the next one later"
            )
        yesterday = (datetime.now(UTC) - timedelta(days=1)).isoformat(timespec="milliseconds")
        event = recipe.event.name
        if recipe.event.kind == "tiles" and transaction.entered_since(team, event, yesterday) >= self.most_daily:
            raise Rejected(
                "queue", f"{event} accepts {self.most_daily} entries per team and day; submit again tomorrow"
            )


def checked_submission(submission: Submission) -> tuple[Recipe, dict[str, bytes], bytes | None]:
    """Validate a submission, and return its recipe, files and plugin."""
    if (submission.plugin is not None) != (submission.division == "open"):
        raise Rejected(
            "schema", "an entry of the open division needs a plugin, and one of the closed division must not have one"
        )
    recipe = parse_recipe(submission.recipe)
    if set(submission.files) != set(recipe.files):
        raise Rejected("schema", "the files sent are not the ones that the recipe names")
    files = {name: _decode_file(name, content) for name, content in submission.files.items()}
    plugin = None if submission.plugin is None else submission.plugin.encode("utf-8", errors="replace")
    return recipe, files, plugin


def _decode_file(name: str, content: str) -> bytes:
    """Decode a file from base64; raise Rejected if it is invalid or too large."""
    try:
        data = binascii.a2b_base64(content, strict_mode=True)
    except (binascii.Error, ValueError):
        raise Rejected("schema", f"the file {name[:80]!r} is not base64") from None
    if len(data) > MOST_FILE_BYTES:
        raise Rejected("too large", f"{name[:80]!r} is larger than the {MOST_FILE_BYTES:,} bytes allowed")
    return data


def first_error(error: ValidationError) -> str:
    """Describe the first validation error in one sentence."""
    details = error.errors()[0]
    where = ".".join(str(part) for part in details["loc"])
    if where in ("score", "speedup", "result", "accuracy", "latency"):
        return f"a submission brings no figures of its own, and this one states {where!r}: the board measures them"
    return f"{where[:80] or 'the request'}: {details['msg']}"
