"""The API: submit, list, look at one entry, events, records, health; and what the teacher does."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from tilewise.bench.events import TinyMLPerf
from tilewise.errors import ConfigurationError
from tilewise.web.limits import HOLDER
from tilewise.web.routes import describe
from tilewise_arena.board.grades import grades_csv
from tilewise_arena.board.tokens import create_token, revoke_token
from tilewise_arena.server import models
from tilewise_arena.server.service import Service
from tilewise_arena.server.views import Views

Number = Annotated[int, Path(ge=1, le=2**31 - 1, description="The entry's number.")]
EventQuery = Annotated[models.EventName | None, Query()]
DivisionQuery = Annotated[models.Division | None, Query()]
_describe = partial(describe, refusal=models.RequestError)
_secured = partial(_describe, secured=True)


def routes(service: Service, views: Views) -> APIRouter:
    """Return the routes of the API."""
    router = APIRouter()
    _add_public(router, service, views)
    _add_teams(router, service)
    _add_teacher(router, service)
    return router


def _add_public(router: APIRouter, service: Service, views: Views) -> None:
    """Add to the router the API's routes that need no token, and those for teams."""
    board = service.board

    @router.get("/health", **_describe(models.Health))
    async def health() -> Any:
        """Report whether the board answers, and how many entries wait for their run."""
        return await service.pulse.check()

    @router.get("/api/events", **_describe(models.EventList))
    async def events() -> Any:
        """Return the events with their rules, and whether they accept entries."""
        open_events = await service.read(board.open_events)
        rows = [
            {"name": e.name, "title": e.title, "rules": e.rules, "open": open_events.get(e.name, True)}
            for e in TinyMLPerf.events()
        ]
        return {"events": rows}

    @router.get("/api/entries", **_describe(models.EntryList, 400))
    async def entries(
        request: Request,
        event: EventQuery = None,
        division: DivisionQuery = None,
        status: Annotated[models.Status | None, Query()] = None,
        team: Annotated[str | None, Query(max_length=40)] = None,
        sort: Annotated[str, Query(pattern="^(score|team|time|id)$")] = "score",
        limit: Annotated[int, Query(ge=1, le=500)] = 100,
        offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
    ) -> Any:
        """List entries one page at a time, best first by default."""
        filters = (event, division, status, _text(team))

        async def make() -> Response:
            """Render one page of entries."""
            rows = await service.read(board.entries, *filters, sort, limit, offset)
            total = await service.read(board.count, *filters)
            next_offset = offset + len(rows)
            return JSONResponse({"entries": rows, "total": total, "next": next_offset if next_offset < total else None})

        return await views.show(request, (*filters, sort, limit, offset), make)

    @router.get("/api/entries/{number}", **_describe(models.EntryFull, 400, 404))
    async def entry(request: Request, number: Number) -> Any:
        """Return one entry with its result; while its event is open, only its team and the teacher see the recipe."""
        facts = await service.visible_entry(number, request.scope.get(HOLDER))
        return facts or JSONResponse({"detail": f"there is no entry {number}", "code": "not there"}, 404)

    @router.get("/api/standings", **_describe(models.Standings, 400))
    async def standings(
        request: Request,
        event: Annotated[models.EventName, Query()],
        division: models.Division = "closed",
        limit: Annotated[int, Query(ge=1, le=500)] = 20,
    ) -> Any:
        """List an event's best entries with their ranks and gains."""

        async def make() -> Response:
            rows = await service.read(board.standings, event, division, "", "score", limit)
            return JSONResponse({"entries": rows})

        return await views.show(request, (event, division, limit), make)

    @router.get("/api/records", **_describe(models.RecordList, 400))
    async def records(
        request: Request, event: Annotated[models.EventName, Query()], division: models.Division = "closed"
    ) -> Any:
        """List every record of an event, oldest first."""

        async def make() -> Response:
            return JSONResponse({"records": await service.read(board.records, event, division)})

        return await views.show(request, (event, division), make)

    @router.get("/api/head", **_describe(models.Head))
    async def head() -> Any:
        """Return the number and hash of the ledger's last link, which proves all earlier ones unchanged."""
        links, last = await service.read(board.head)
        return {"links": links, "hash": last}


def _text(value: str | None) -> str | None:
    """Remove NUL characters, which PostgreSQL does not store and no team's name has."""
    return None if value is None else value.replace("\0", "")


def _add_teams(router: APIRouter, service: Service) -> None:
    """Add the route by which a team submits an entry."""

    @router.post("/api/entries", status_code=201, **_secured(models.Receipt, 400, 409, 413, takes=models.Submission))
    async def submit(request: Request) -> Any:
        """Submit a recipe. The response is sent once it is on the disk; a worker measures it afterwards."""
        holder = await service.holder(request)
        body = await service.body(request, models.Submission)
        return await service.enter(holder, body)


def _add_teacher(router: APIRouter, service: Service) -> None:
    """Add the routes that need a teacher's token."""
    board = service.board

    @router.get("/api/tokens", **_secured(models.TokenList))
    async def tokens(request: Request) -> Any:
        """List tokens by name; their secrets are not stored."""
        await service.admin(request)
        return {"tokens": await service.read(board.teams)}

    @router.post("/api/tokens", status_code=201, **_secured(models.MadeToken, 400, 413, takes=models.NewToken))
    async def make_token(request: Request) -> Any:
        """Create a token for a team; it is shown once."""
        teacher = await service.admin(request)
        body = await service.body(request, models.NewToken)
        token = await service.read(create_token, board, body.team, body.admin, teacher.id)
        return {"token": token, "id": token.split("_")[1], "team": body.team}

    @router.delete("/api/tokens/{identifier}", **_secured(models.Done, 400, 404, 413))
    async def drop_token(request: Request, identifier: Annotated[str, Path(pattern="^[0-9a-f]{8}$")]) -> Any:
        """Revoke a token by its public name."""
        teacher = await service.admin(request)
        try:
            await service.read(revoke_token, board, identifier, teacher.id)
        except ConfigurationError as error:
            return JSONResponse({"detail": str(error), "code": "not there"}, 404)
        return {"done": f"token {identifier} is revoked"}

    @router.post("/api/events/{name}", **_secured(models.Done, 400, 413, takes=models.Opening))
    async def open_or_close(request: Request, name: models.EventName) -> Any:
        """Open or close an event for new entries."""
        teacher = await service.admin(request)
        body = await service.body(request, models.Opening)
        await service.write(lambda transaction: transaction.set_open(name, body.open, teacher.id))
        return {"done": f"{name} is {'open' if body.open else 'closed'}"}

    on_entry = _secured(models.Done, 400, 404, 413)

    @router.post(
        "/api/entries/{number}/disqualify",
        **_secured(models.Done, 400, 404, 413, takes=models.Disqualification),
    )
    async def disqualify(request: Request, number: Number) -> Any:
        """Remove an entry from the ranking; the entry and the reason stay visible."""
        by = (await service.admin(request)).id
        body = await service.body(request, models.Disqualification)
        return await _change_entry(service, "disqualify", number, by, body.reason)

    @router.post("/api/entries/{number}/reinstate", **on_entry)
    async def reinstate(request: Request, number: Number) -> Any:
        """Lift a disqualification; the entry is measured again."""
        return await _change_entry(service, "reinstate", number, (await service.admin(request)).id)

    @router.post("/api/entries/{number}/rerun", **on_entry)
    async def rerun(request: Request, number: Number) -> Any:
        """Queue a closed entry for another run."""
        return await _change_entry(service, "rerun", number, (await service.admin(request)).id)

    csv = {200: {"content": {"text/csv": {"schema": {"type": "string"}}}}}

    # the response class is that of its refusals; the grades themselves are text/csv
    @router.get("/api/grades.csv", response_class=JSONResponse, **_secured(None, responses=csv))
    async def grades(request: Request) -> Any:
        """Return the best verified entry of every team in every event."""
        await service.admin(request)
        return PlainTextResponse(await service.read(grades_csv, board), media_type="text/csv")


async def _change_entry(service: Service, action: str, number: int, by: str, reason: str = "") -> Any:
    """Perform an administrator's action on an entry; respond with what was done, or 404."""
    if await service.read(service.board.entry, number) is None:
        return JSONResponse({"detail": f"there is no entry {number}", "code": "not there"}, 404)
    return {"done": f"entry {number} is {await service.change_entry(action, number, by, reason)}"}
