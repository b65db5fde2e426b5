"""The teacher's pages: sign in with the teacher's token, then tokens, events, entries, grades and backups.

The cookie is not the token but a random name for the session, of which the board keeps a hash; signing out forgets it.
It is sent only to this site (SameSite=Strict), no script can read it, and a form that another site sent is refused.
What a teacher does is written into the ledger with the public name of the token they signed in with.
"""

from __future__ import annotations

import hashlib
import hmac
from urllib.parse import urlsplit

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse

from tilewise.bench.events import TinyMLPerf
from tilewise.errors import Rejected, TilewiseError
from tilewise_arena.board.backup import backup_lines
from tilewise_arena.board.grades import grades_csv
from tilewise_arena.board.sessions import end_session, open_session, session_holder
from tilewise_arena.board.tokens import Holder, create_token, holder_of, revoke_token
from tilewise_arena.board.verify import verify
from tilewise_arena.server.pages import form, page
from tilewise_arena.server.service import Service

_COOKIE = "tilewise_teacher"
_HOURS = 12


def routes(service: Service) -> APIRouter:
    """Return the routes of the teacher's pages."""
    router = APIRouter(prefix="/teacher")
    _add_session(router, service)
    _add_overview(router, service)
    _add_actions(router, service)
    return router


async def _teacher(service: Service, request: Request) -> Holder | None:
    """Return the teacher whose session cookie the request has; None if there is no valid one."""
    cookie = request.cookies.get(_COOKIE, "")
    if not 0 < len(cookie) <= 100:
        return None
    holder = await service.read(session_holder, service.board, cookie)
    return holder if holder is not None and holder.is_admin else None


def _from_elsewhere(request: Request) -> bool:
    """Tell whether the browser says that the request comes from a page of another site."""
    return request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none")


def _form_token(request: Request) -> str:
    """Return the CSRF token for the forms of a session, derived from its cookie."""
    return hashlib.sha256(b"form " + request.cookies.get(_COOKIE, "").encode("utf-8", "surrogatepass")).hexdigest()


def _is_ours(request: Request, fields: dict[str, str]) -> bool:
    """Tell whether a form was sent from this site, by its CSRF token or its origin."""
    if _from_elsewhere(request):
        return False
    token = fields.get("form", "").encode("utf-8", "replace")
    if hmac.compare_digest(token, _form_token(request).encode()):
        return True
    origin = request.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == request.headers.get("host", "")


def _add_session(router: APIRouter, service: Service) -> None:
    """Add the routes for signing in and out."""

    @router.post("/in")
    async def sign_in(request: Request) -> Response:
        """Open a session for a teacher's token and set its cookie."""
        fields = await form(request)
        holder = await service.read(holder_of, service.board, fields.get("token", ""))
        if holder is None or not holder.is_admin or _from_elsewhere(request):
            return page("login.html", 403, error="This is not a teacher's token.")
        secret = await service.read(open_session, service.board, holder.id, _HOURS * 3600.0)
        answer = RedirectResponse("/teacher", 303)
        secure = request.url.scheme == "https" or request.headers.get("origin", "").startswith("https://")
        answer.set_cookie(
            _COOKIE, secret, _HOURS * 3600, path="/teacher", secure=secure, httponly=True, samesite="strict"
        )
        return answer

    @router.post("/out")
    async def sign_out(request: Request) -> Response:
        """End the session and delete its cookie."""
        if _from_elsewhere(request):  # which would end a session in a browser that did not even send its cookie
            return page("login.html", 403, error="This came from another site.")
        if await _teacher(service, request) is not None:
            await service.read(end_session, service.board, request.cookies[_COOKIE])
        answer = RedirectResponse("/teacher", 303)
        answer.delete_cookie(_COOKIE, path="/teacher")
        return answer


def _add_overview(router: APIRouter, service: Service) -> None:
    """Add the teacher's page and its downloads."""
    board = service.board

    @router.get("")
    async def overview(request: Request) -> Response:
        if await _teacher(service, request) is None:
            return page("login.html", error="")
        return await _overview(service, request)

    @router.get("/grades.csv")
    async def grades(request: Request) -> Response:
        if await _teacher(service, request) is None:
            return page("login.html", 403, error="Sign in first.")
        return PlainTextResponse(await service.read(grades_csv, board), 200, _download("grades.csv"), "text/csv")

    @router.get("/backup.jsonl")
    async def backup(request: Request) -> Response:
        """Return a backup of the board as a download."""
        if await _teacher(service, request) is None:
            return page("login.html", 403, error="Sign in first.")
        lines = (f"{line}\n" for line in backup_lines(board))
        return StreamingResponse(lines, 200, _download("board-backup.jsonl"), "application/jsonl")


def _download(name: str) -> dict[str, str]:
    return {"Content-Disposition": f"attachment; filename={name}"}


async def _overview(
    service: Service, request: Request, sentence: str = "", token: str = "", status: int = 200
) -> Response:
    """Render the teacher's overview page; `sentence` and `token` are the results of an action to show.

    The board is verified only on request (?check=1), since that reads all of it.
    """
    board = service.board
    links, head = await service.read(board.head)
    open_events = await service.read(board.open_events)
    return page(
        "teacher.html",
        status,
        tokens=await service.read(board.teams),
        openings=[(event, open_events.get(event.name, True)) for event in TinyMLPerf.events()],
        latest=await service.read(board.entries, sort="time", limit=50),
        verdict=await service.read(verify, board) if request.query_params.get("check") else None,
        links=links,
        head=head,
        form=_form_token(request),
        waiting=await service.read(board.waiting),
        said=sentence,
        token=token,
    )


def _add_actions(router: APIRouter, service: Service) -> None:
    """Add the route for the forms of the teacher's page."""

    @router.post("/do")
    async def do(request: Request) -> Response:
        """Perform the action of a form and show the overview with its result."""
        fields = await form(request)
        teacher = await _teacher(service, request)
        if teacher is None or not _is_ours(request, fields):
            return page("login.html", 403, error="Sign in first.")
        try:
            sentence, token = await _carry_out(service, fields, teacher.id)
        except (TilewiseError, ValueError) as error:
            return await _overview(service, request, f"Not done: {error}", status=400)
        return await _overview(service, request, sentence, token)


async def _carry_out(service: Service, fields: dict[str, str], by: str) -> tuple[str, str]:
    """Perform the action that a form asks for; return a message, and the token that was created or ""."""
    action = fields.get("action", "")
    if action == "token":
        team = fields.get("team", "").strip()
        token = await service.read(create_token, service.board, team, False, by)
        return f"A token for {team}. Copy it now: it is not kept and cannot be shown again.", token
    if action == "revoke":
        await service.read(revoke_token, service.board, fields.get("id", ""), by)
        return f"Token {fields.get('id', '')} is revoked.", ""
    if action in ("open", "close"):
        name = TinyMLPerf.event(fields.get("event", "")).name
        await service.write(lambda transaction: transaction.set_open(name, action == "open", by))
        return f"{name} is {'open' if action == 'open' else 'closed'}.", ""
    number = fields.get("entry", "")
    if not number.isascii() or not number.isdecimal() or len(number) > 9:
        raise Rejected("schema", "an entry must be given by its number")
    done = await service.change_entry(action, int(number), by, fields.get("reason", ""))
    return f"Entry {number}: {done}.", ""
