"""Pages for everybody: the events, a board, an entry, and a form to submit. Rendered here; no other host is asked."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, FileSystemLoader, select_autoescape

from tilewise.bench.errors import Rejected
from tilewise.bench.events import TinyMLPerf
from tilewise.bench.jsontext import parse_json
from tilewise.bench.recipe import parse_recipe
from tilewise.bench.server import charts, models
from tilewise.bench.server.service import Service
from tilewise.bench.submission import reference_recipe
from tilewise.bench.tokens import holder_of
from tilewise.errors import ConfigurationError, TilewiseError

_FOLDER = Path(__file__).parent / "templates"
_pages = Environment(
    loader=FileSystemLoader(_FOLDER), autoescape=select_autoescape(default=True), trim_blocks=True, lstrip_blocks=True
)
_pages.globals |= {"bars": charts.bars, "history": charts.history, "pair_bars": charts.pair_bars}
_pages.filters["gain"] = lambda value: "–" if value is None else f"{value:.2f}×"
_pages.filters["score"] = lambda value: "–" if value is None else f"{value:.3f}"
_pages.filters["share"] = lambda value: "–" if value is None else f"{100 * value:.1f} %"
_pages.filters["minute"] = lambda value: str(value)[:16].replace("T", " ")

STATUS = {
    "queued": "waiting",
    "scored": "verified",
    "rejected": "rejected",
    "noisy": "too noisy",
    "unverified": "unverified",
    "disqualified": "disqualified",
}


def page(name: str, status: int = 200, **values: Any) -> HTMLResponse:
    """A template as an answer."""
    shown = {"events": TinyMLPerf.events(), "status_words": STATUS} | values
    return HTMLResponse(_pages.get_template(name).render(**shown), status)


def not_there(request: Request) -> HTMLResponse:
    return page("message.html", 404, title="Not there", text=f"There is nothing at {request.url.path[:200]}.")


async def form(request: Request) -> dict[str, str]:
    """The fields of a posted form; its size was bounded before it was read."""
    content = (await request.body()).decode("utf-8", errors="replace")
    return dict(parse_qsl(content, keep_blank_values=True, max_num_fields=20))


def routes(service: Service) -> APIRouter:
    router = APIRouter()
    _add_boards(router, service)
    _add_submit(router, service)
    return router


def _add_boards(router: APIRouter, service: Service) -> None:
    board = service.board

    @router.get("/")
    async def front() -> Response:
        return page("front.html", cards=await service.read(_cards, board), waiting=await service.read(board.waiting))

    @router.get("/board/{name}")
    async def event_board(
        request: Request, name: str, division: str = "closed", team: str = "", sort: str = "score"
    ) -> Response:
        try:
            event = TinyMLPerf.event(name)
        except ConfigurationError:
            return not_there(request)
        division = division if division in ("closed", "open") else "closed"
        team = team[:40].replace("\0", "")
        rows = await service.read(board.standings, event.name, division, team, sort)
        _rank(rows)
        records = await service.read(board.records, event.name, division)
        is_open = (await service.read(board.open_events)).get(event.name, True)
        return page(
            "board.html", event=event, division=division, rows=rows, records=records, team=team, is_open=is_open
        )

    @router.get("/entry/{number}")
    async def entry(request: Request, number: str) -> Response:
        known = number.isascii() and number.isdecimal() and len(number) < 10
        found = await service.read(board.entry, int(number)) if known else None
        if found is None:
            return not_there(request)
        result = found["result"] or {}
        pairs, steps = charts.before_and_after(result), charts.step_rows(result.get("steps", []))
        recipe = json.dumps(parse_recipe(found["recipe"]).as_dict(), indent=2)  # in the order people write it
        event = TinyMLPerf.event(found["event"])
        return page("entry.html", entry=found, result=result, pairs=pairs, steps=steps, recipe=recipe, event=event)


def _rank(rows: list[dict[str, Any]]) -> None:
    """Places by score among the entries that count."""
    counting = [row for row in rows if row["score"] is not None and row["status"] == "scored"]
    counting.sort(key=lambda row: (-row["score"], row["id"]))
    for row in rows:
        row["rank"] = None
    for place, row in enumerate(counting, 1):
        row["rank"] = place


def _cards(board: Any) -> list[dict[str, Any]]:
    """For every event: its record, how many entries it has, whether it is open."""
    known, cards = board.open_events(), []
    for event in TinyMLPerf.events():
        number = board.record(event.name, "closed")
        holder = board.entry(number) if number is not None else None
        entries = board.entries(event.name, limit=100_000)
        teams = len({row["team"] for row in entries})
        card = {"event": event, "record": holder, "count": len(entries), "teams": teams}
        cards.append(card | {"open": known.get(event.name, True)})
    return cards


def _add_submit(router: APIRouter, service: Service) -> None:
    @router.get("/submit")
    async def empty_form(event: str = "MLP_SPRINT") -> Response:
        return page("submit.html", recipe=_example(event), error="")

    @router.post("/submit")
    async def sent_form(request: Request) -> Response:
        fields = await form(request)
        try:
            holder = await service.read(holder_of, service.board, fields.get("token", ""))
            if holder is None:
                raise Rejected("token", "this token is not known here; ask whoever runs the board for one")
            content = await asyncio.to_thread(parse_json, fields.get("recipe", ""))
            if not isinstance(content, dict):
                raise Rejected("schema", "a recipe is a JSON object with an event and steps")
            receipt = await service.enter(holder, models.Submission.model_validate({"recipe": content}))
        except TilewiseError as error:
            return page("submit.html", 400, recipe=fields.get("recipe", "")[:65536], error=str(error))
        return RedirectResponse(f"/entry/{receipt['entry']}", 303)


def _example(event: str) -> str:
    try:
        return json.dumps(reference_recipe(event).as_dict(), indent=2)
    except ConfigurationError:
        return json.dumps(reference_recipe("MLP_SPRINT").as_dict(), indent=2)
