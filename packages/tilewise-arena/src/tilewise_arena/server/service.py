"""What the routes share: who is asking, what they sent, and errors as answers."""

from __future__ import annotations

import asyncio
import binascii
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ValidationError

from tilewise.bench.errors import Rejected
from tilewise.bench.jsontext import parse_json
from tilewise.bench.recipe import MOST_FILE_BYTES, Recipe, parse_recipe
from tilewise.bench.scoring import NO_TRUTH
from tilewise.errors import ConfigurationError, TilewiseError, UnavailableError
from tilewise.web.limits import HOLDER, MAX_BODY_BYTES
from tilewise_arena.board import Board, Transaction
from tilewise_arena.board.tokens import Holder, holder_of
from tilewise_arena.board.transactions import Replayed
from tilewise_arena.sandbox import bubblewrap
from tilewise_arena.server.models import Problem, Submission
from tilewise_arena.server.writer import Busy, Writer

_STATUS = {"replayed": 409, "event closed": 409, "too large": 413, "team": 403, "token": 401, "queue": 429, "room": 413}
_SENTENCES = {400: "not understood", 401: "no token, or one that is not known", 403: "not yours to do"}
_SENTENCES |= {404: "not there", 409: "there already, or closed", 413: "too large", 429: "too much at once"}
_SENTENCES |= {503: "the board does not take it now"}
MOST_STORED = 256 << 20
_PULSE_SECONDS, _SECONDS_KNOWN, _SECONDS_FOR_PULSE = 0.1, 2.0, 3.0


def problems(*codes: int) -> dict[int | str, dict[str, Any]]:
    """The documented refusals of a route."""
    return {code: {"model": Problem, "description": _SENTENCES[code]} for code in sorted({*codes, 429})}


def answer_for(error: TilewiseError) -> JSONResponse:
    """A refusal as the API gives it."""
    code = getattr(error, "code", "")
    status = _STATUS.get(code, 400)
    if isinstance(error, UnavailableError):
        status = 503
    body: dict[str, Any] = {"detail": str(error), "code": code or "refused"}
    if isinstance(error, Replayed):
        body["entry"] = error.entry
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    if status in (429, 503):
        headers["Retry-After"] = "2"
    return JSONResponse(body, status, headers)


@dataclass
class Service:
    """The board behind the routes."""

    board: Board
    writer: Writer
    most_queued: int = 100  # entries of one team that may wait for their run
    most_stored: int = MOST_STORED  # bytes that the files and recipes of one team may take
    has_truth: bool = False  # whether the workers have the collection that TILE_OLYMPIAD is scored against
    most_daily: int = 10  # entries of one team in a day, where each answer tells something about the truth
    workers: Callable[[], int] | None = None  # how many measuring processes live, where this server has its own
    _readers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8, "board-reader"))
    _pulse: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "board-health"))
    _question: asyncio.Future[int] | None = None  # the last time the pulse was taken
    _taken: float = 0.0
    _heard: tuple[float, int] = (-1e9, 0)  # when the pulse was last known, and what it said
    _parsing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))  # large bodies one by one

    async def change(self, change: Callable[[Transaction], Any]) -> Any:
        return await asyncio.wrap_future(self.writer.put(change))

    async def read(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._readers, partial(function, *args))

    async def pulse(self) -> dict[str, Any]:
        """Whether the board answers, asked in a thread of its own: busy readers do not make it look dead.

        A crowd that asks within a fraction of a second is told the same.
        """
        try:
            waiting = await asyncio.wait_for(asyncio.shield(self._asked()), _SECONDS_FOR_PULSE)
        except Exception:  # whatever the database says or does not say
            raise UnavailableError("the board's database does not answer") from None
        self._heard = (time.monotonic(), waiting)
        return self._health(waiting)

    def known_pulse(self) -> dict[str, Any] | None:
        """What the pulse said a moment ago, if that is not long; it is taken again behind whoever asks."""
        asked = self._asked()
        if asked.done() and not asked.cancelled() and asked.exception() is None:
            self._heard = (max(self._heard[0], self._taken), asked.result())
        return self._health(self._heard[1]) if time.monotonic() - self._heard[0] < _SECONDS_KNOWN else None

    def _asked(self) -> asyncio.Future[int]:
        """The question that is under way, or a new one where the last was answered a while ago."""
        now = time.monotonic()
        if self._question is None or (self._question.done() and now - self._taken > _PULSE_SECONDS):
            self._taken = now
            self._question = asyncio.get_running_loop().run_in_executor(self._pulse, self.board.waiting)
        return self._question

    def _health(self, waiting: int) -> dict[str, Any]:
        alive = None if self.workers is None else self.workers()
        return {"status": "no worker runs" if alive == 0 else "ok", "waiting": waiting, "workers": alive}

    def close(self) -> None:
        self.writer.close()
        for pool in (self._readers, self._pulse):
            pool.shutdown(wait=False, cancel_futures=True)
        self.board.close()

    async def lookup(self, token: str) -> Holder | None:
        """Whose token this is."""
        found: Holder | None = await self.read(holder_of, self.board, token)
        return found

    async def holder(self, request: Request) -> Holder:
        """Whose token came with the request; it was looked up when the request came in."""
        found: Holder | None = request.scope.get(HOLDER)
        if found is None:
            raise Rejected("token", "this needs a token that the board knows: Authorization: Bearer tw_…")
        return found

    async def admin(self, request: Request) -> Holder:
        holder = await self.holder(request)
        if not holder.is_admin:
            raise Rejected("team", "this needs the teacher's token; a team's is not enough")
        return holder

    async def body(self, request: Request, model: type[BaseModel]) -> Any:
        """The request's JSON, bounded in depth, as `model`."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Rejected("schema", "the body must be application/json")
        async with self._parsing:
            content = await self.read(parse_json, await request.body(), MAX_BODY_BYTES)
        try:
            return model.model_validate(content)
        except ValidationError as error:
            raise Rejected("schema", first_error(error)) from None

    async def enter(self, holder: Holder, given: Submission) -> dict[str, Any]:
        """Check a submission and put it on the board."""
        if given.team is not None and given.team != holder.team:
            raise Rejected("team", "this token belongs to another team than the entry says")
        if holder.is_admin:
            raise Rejected("team", "the teacher's token does not enter; make one for a team")
        recipe, files, plugin = await self.read(checked_submission, given)
        if given.division == "open":
            reason = await self.read(bubblewrap.unavailable_reason)
            if reason:
                raise Rejected("event closed", reason)
        if recipe.event.kind == "tiles" and not self.has_truth:
            raise Rejected("event closed", f"this board takes no entries of this event: {NO_TRUTH}")

        def change(transaction: Transaction) -> dict[str, Any]:
            self._check_room(transaction, holder.team, recipe, sum(map(len, files.values())) + len(plugin or b""))
            return transaction.submit(holder.team, recipe.as_dict(), files, given.division, plugin)

        receipt: dict[str, Any] = await self.change(change)
        return receipt

    def _check_room(self, transaction: Transaction, team: str, recipe: Recipe, brings: int) -> None:
        """Refuse a team that has too much waiting or stored, or asks the same truth too often."""
        if transaction.stored_by(team) + brings > self.most_stored:
            most = f"{self.most_stored / (1 << 20):,.0f} MiB"
            raise Rejected("room", f"the files of {team} would take more than the {most} that a team has here")
        if transaction.queued_of(team) >= self.most_queued:
            raise Rejected("queue", f"{self.most_queued} entries of {team} wait for their run already")
        yesterday = (datetime.now(UTC) - timedelta(days=1)).isoformat(timespec="milliseconds")
        event = recipe.event.name
        if recipe.event.kind == "tiles" and transaction.entered_since(team, event, yesterday) >= self.most_daily:
            raise Rejected("queue", f"{event} takes {self.most_daily} entries of a team a day; come back tomorrow")


def checked_submission(given: Submission) -> tuple[Recipe, dict[str, bytes], bytes | None]:
    """The recipe, its files and its plugin, each checked."""
    if (given.plugin is not None) != (given.division == "open"):
        raise Rejected("schema", "the open division takes a plugin, and the closed one does not")
    recipe = parse_recipe(given.recipe)
    if set(given.files) != set(recipe.files):
        raise Rejected("schema", "the files sent are not those that the recipe names")
    files = {name: _decoded(name, content) for name, content in given.files.items()}
    plugin = None if given.plugin is None else given.plugin.encode("utf-8", errors="replace")
    return recipe, files, plugin


def _decoded(name: str, content: str) -> bytes:
    try:
        found = binascii.a2b_base64(content, strict_mode=True)
    except (binascii.Error, ValueError):
        raise Rejected("schema", f"the file {name[:80]!r} is not base64") from None
    if len(found) > MOST_FILE_BYTES:
        raise Rejected("too large", f"{name[:80]!r} is larger than the {MOST_FILE_BYTES:,} bytes allowed")
    return found


def first_error(error: ValidationError) -> str:
    found = error.errors()[0]
    where = ".".join(str(part) for part in found["loc"])
    if where in ("score", "speedup", "result", "accuracy", "latency"):
        return f"a submission brings no figures of its own, and this one states {where!r}: the board measures them"
    return f"{where[:80] or 'the request'}: {found['msg']}"


async def on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, TilewiseError)
    return answer_for(error)


__all__ = ["Busy", "ConfigurationError", "Service", "answer_for", "checked_submission", "on_error", "problems"]
