"""Pages for everybody: the events, a board, an entry, and a form to submit. Rendered here; no other host is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, FileSystemLoader, select_autoescape

from tilewise.bench.events import Event, TinyMLPerf
from tilewise.bench.jsontext import parse_json
from tilewise.bench.recipe import parse_recipe
from tilewise.bench.submission import reference_recipe
from tilewise.errors import ConfigurationError, Rejected, TilewiseError
from tilewise_arena.board import Board
from tilewise_arena.board.tokens import holder_of
from tilewise_arena.server import charts, models
from tilewise_arena.server.service import Service
from tilewise_arena.server.views import Views

_FOLDER = Path(__file__).parent / "templates"
_ROWS = 50  # of a board's page
_pages = Environment(
    loader=FileSystemLoader(_FOLDER), autoescape=select_autoescape(default=True), trim_blocks=True, lstrip_blocks=True
)
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
    """Render the template `name` with these values as an HTML response."""
    variables = {"events": TinyMLPerf.events(), "status_words": STATUS} | values
    return HTMLResponse(_pages.get_template(name).render(**variables), status)


def not_there(request: Request) -> HTMLResponse:
    return page("message.html", 404, title="Not there", text=f"There is nothing at {request.url.path[:200]}.")


async def form(request: Request) -> dict[str, str]:
    """Parse the fields of a posted form, whose size was limited before it was read."""
    content = (await request.body()).decode("utf-8", errors="replace")
    try:
        return dict(parse_qsl(content, keep_blank_values=True, max_num_fields=20))
    except ValueError:
        raise Rejected("schema", "a form may have at most 20 fields") from None


def routes(service: Service, views: Views) -> APIRouter:
    """Return the routes of the public boards and of submissions."""
    router = APIRouter()
    for name in _pages.list_templates():  # compiled before anybody waits for it
        _pages.get_template(name)
    _add_boards(router, service, views)
    _add_submit(router, service)
    return router


def _add_boards(router: APIRouter, service: Service, views: Views) -> None:
    """Add to the router the pages of the website's front, the rankings, and single entries."""
    board = service.board

    @router.get("/")
    async def front(request: Request) -> Response:
        """Show the front page with a card for each event."""

        async def make() -> Response:
            cards = await service.read(_cards, board)
            return page("front.html", cards=cards, waiting=await service.read(board.waiting))

        return await views.show(request, "front", make)

    @router.get("/board/{name}")
    async def event_board(
        request: Request, name: str, division: str = "closed", team: str = "", sort: str = "score", number: str = "1"
    ) -> Response:
        """Show a page of an event's board; unknown parameters fall back to their defaults."""
        try:
            event = TinyMLPerf.event(name)
        except ConfigurationError:
            return not_there(request)
        division = division if division in ("closed", "open") else "closed"
        team = team[:40].replace("\0", "")
        sort = sort if sort in ("score", "team", "time", "id") else "score"
        at = int(number) if number.isascii() and number.isdecimal() and len(number) < 6 else 1

        async def make() -> Response:
            return await service.read(_board_page, board, event, division=division, team=team, sort=sort, at=max(at, 1))

        return await views.show(request, (division, team, sort, at), make)

    @router.get("/entry/{number}")
    async def entry(request: Request, number: str) -> Response:
        """Show an entry with its figures and, once the event is closed, its recipe."""
        is_number = number.isascii() and number.isdecimal() and len(number) < 10
        facts = await service.visible_entry(int(number), None) if is_number else None
        if facts is None:
            return not_there(request)

        async def make() -> Response:
            return await service.read(_entry_page, facts)

        return await views.show(request, number, make)


def _board_page(board: Board, event: Event, division: str, team: str, sort: str, at: int) -> HTMLResponse:
    """Render a page of an event's ranking that begins at row `at`, with links to other pages."""
    total = board.count(event.name, division, None, team or None)
    pages = max(-(-total // _ROWS), 1)
    at = min(at, pages)
    values: dict[str, Any] = {"event": event, "division": division, "team": team, "sort": sort, "at": at}
    values |= {"rows": board.standings(event.name, division, team, sort, _ROWS, (at - 1) * _ROWS)}
    records = board.records(event.name, division)
    values |= {"records": records, "history": charts.history(records), "total": total, "pages": pages}
    return page("board.html", **values, is_open=board.open_events().get(event.name, True))


def _entry_page(entry: dict[str, Any]) -> HTMLResponse:
    """Render an entry's page: recipe (empty while the event is open), results and charts."""
    result = entry["result"] or {}
    pairs, steps = charts.before_and_after(result), charts.step_rows(result.get("steps", []))
    content = entry["recipe"]  # empty while the event is open
    recipe = json.dumps(parse_recipe(content).as_dict(), indent=2) if content else ""  # in the order people write it
    event = TinyMLPerf.event(entry["event"])
    return page("entry.html", entry=entry, result=result, pairs=pairs, steps=steps, recipe=recipe, event=event)


def _cards(board: Board) -> list[dict[str, Any]]:
    """Return, for each event of the front page, its record, number of entries and whether it is open."""
    open_events, cards = board.open_events(), []
    for event in TinyMLPerf.events():
        number = board.record(event.name, "closed")
        holder = board.entry(number) if number is not None else None
        card = {"event": event, "record": holder, "count": board.count(event.name), "teams": board.teams_of(event.name)}
        cards.append(card | {"open": open_events.get(event.name, True)})
    return cards


def _add_submit(router: APIRouter, service: Service) -> None:
    """Add the form for submissions."""

    @router.get("/submit")
    async def empty_form(event: str = "MLP_SPRINT") -> Response:
        return page("submit.html", recipe=_example_recipe(event), error="")

    @router.post("/submit")
    async def sent_form(request: Request) -> Response:
        """Enter the recipe of the form, or show the form again with the error."""
        fields: dict[str, str] = {}
        try:
            fields = await form(request)
            holder = await service.read(holder_of, service.board, fields.get("token", ""))
            if holder is None:
                raise Rejected("token", "this token is not known here; ask whoever runs the board for one")
            content = await service.read(parse_json, fields.get("recipe", ""))
            if not isinstance(content, dict):
                raise Rejected("schema", "a recipe is a JSON object with an event and steps")
            receipt = await service.enter(holder, models.Submission.model_validate({"recipe": content}))
        except TilewiseError as error:
            return page("submit.html", 400, recipe=fields.get("recipe", "")[:65536], error=str(error))
        return RedirectResponse(f"/entry/{receipt['entry']}", 303)


def _example_recipe(event: str) -> str:
    """Return the recipe that the submission form shows."""
    if event == "TILE_OLYMPIAD":
        return json.dumps({"tilewise": 1, "event": event, "name": "mine", "predictions": "predictions.csv"}, indent=2)
    try:
        return json.dumps(reference_recipe(event).as_dict(), indent=2)
    except ConfigurationError:
        return json.dumps(reference_recipe("MLP_SPRINT").as_dict(), indent=2)
