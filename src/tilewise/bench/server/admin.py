"""The teacher's pages: sign in with the teacher's token, then tokens, events, entries, grades and backups.

The cookie is not the token but a statement "this token's holder, until then", signed with the board's key. It is sent
only to this site (SameSite=Strict), no script can read it, and a form posted from another origin is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse

from tilewise.bench.board.backup import backup_lines
from tilewise.bench.board.verify import verify
from tilewise.bench.errors import Rejected
from tilewise.bench.events import TinyMLPerf
from tilewise.bench.grades import grades_csv
from tilewise.bench.server.pages import form, page
from tilewise.bench.server.service import Service
from tilewise.bench.tokens import create_token, holder_of, revoke_token
from tilewise.errors import TilewiseError

_COOKIE = "tilewise_teacher"
_HOURS = 12


def routes(service: Service) -> APIRouter:
    router = APIRouter(prefix="/teacher")
    _add_session(router, service)
    _add_overview(router, service)
    _add_actions(router, service)
    return router


def _signed(service: Service, identifier: str, until: int) -> str:
    text = f"{identifier}.{until}"
    key = service.board.key or b""
    return f"{text}.{hmac.new(key, b'teacher ' + text.encode(), hashlib.sha256).hexdigest()}"


async def _teacher(service: Service, request: Request) -> bool:
    """Whether the cookie was signed here, has time left, and its token is not revoked."""
    parts = request.cookies.get(_COOKIE, "").split(".")
    if len(parts) != 3 or not parts[1].isdecimal() or int(parts[1]) < time.time():
        return False
    if not hmac.compare_digest(".".join(parts), _signed(service, parts[0], int(parts[1]))):
        return False
    known = await service.read(service.board.teams)
    return any(t["id"] == parts[0] and t["role"] == "admin" and t["revoked_at"] is None for t in known)


def _same_origin(request: Request) -> bool:
    origin = request.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == request.headers.get("host", "")


def _add_session(router: APIRouter, service: Service) -> None:
    @router.post("/in")
    async def sign_in(request: Request) -> Response:
        fields = await form(request)
        holder = await service.read(holder_of, service.board, fields.get("token", ""))
        if holder is None or not holder.is_admin or not _same_origin(request):
            return page("login.html", 403, error="This is not a teacher's token.")
        answer = RedirectResponse("/teacher", 303)
        secure = request.url.scheme == "https"
        value = _signed(service, holder.id, int(time.time()) + _HOURS * 3600)
        answer.set_cookie(
            _COOKIE, value, _HOURS * 3600, path="/teacher", secure=secure, httponly=True, samesite="strict"
        )
        return answer

    @router.post("/out")
    async def sign_out() -> Response:
        answer = RedirectResponse("/teacher", 303)
        answer.delete_cookie(_COOKIE, path="/teacher")
        return answer


def _add_overview(router: APIRouter, service: Service) -> None:
    board = service.board

    @router.get("")
    async def overview(request: Request) -> Response:
        if not await _teacher(service, request):
            return page("login.html", error="")
        return await _overview(service)

    @router.get("/grades.csv")
    async def grades(request: Request) -> Response:
        if not await _teacher(service, request):
            return page("login.html", 403, error="Sign in first.")
        headers = {"Content-Disposition": "attachment; filename=grades.csv"}
        return PlainTextResponse(await service.read(grades_csv, board), media_type="text/csv", headers=headers)

    @router.get("/backup.jsonl")
    async def backup(request: Request) -> Response:
        if not await _teacher(service, request):
            return page("login.html", 403, error="Sign in first.")
        headers = {"Content-Disposition": "attachment; filename=board-backup.jsonl"}
        lines = (f"{line}\n" for line in backup_lines(board))
        return StreamingResponse(lines, media_type="application/jsonl", headers=headers)


async def _overview(service: Service, said: str = "", token: str = "", status: int = 200) -> Response:
    board = service.board
    known = await service.read(board.open_events)
    return page(
        "teacher.html",
        status,
        tokens=await service.read(board.teams),
        openings=[(event, known.get(event.name, True)) for event in TinyMLPerf.events()],
        latest=await service.read(board.entries, None, None, None, None, "time", 50, 0),
        verdict=await service.read(verify, board),
        waiting=await service.read(board.waiting),
        said=said,
        token=token,
    )


def _add_actions(router: APIRouter, service: Service) -> None:
    @router.post("/do")
    async def do(request: Request) -> Response:
        if not _same_origin(request) or not await _teacher(service, request):
            return page("login.html", 403, error="Sign in first.")
        fields = await form(request)
        try:
            said, token = await _carry_out(service, fields)
        except (TilewiseError, ValueError) as error:
            return await _overview(service, f"Not done: {error}", status=400)
        return await _overview(service, said, token)


async def _carry_out(service: Service, fields: dict[str, str]) -> tuple[str, str]:
    action = fields.get("action", "")
    if action == "token":
        team = fields.get("team", "").strip()
        token: str = await service.read(create_token, service.board, team)
        return f"A token for {team}. Copy it now: it is not kept and cannot be shown again.", token
    if action == "revoke":
        await service.read(revoke_token, service.board, fields.get("id", ""))
        return f"Token {fields.get('id', '')} is revoked.", ""
    if action in ("open", "close"):
        name = TinyMLPerf.event(fields.get("event", "")).name
        await service.change(lambda transaction: transaction.set_open(name, action == "open"))
        return f"{name} is {'open' if action == 'open' else 'closed'}.", ""
    number = _number(fields.get("entry", ""))
    changes: dict[str, Any] = {
        "disqualify": lambda transaction: transaction.disqualify(number, fields.get("reason", "")),
        "rerun": lambda transaction: transaction.requeue(number),
    }
    if action not in changes:
        raise Rejected("schema", "the page does not know this action")
    await service.change(changes[action])
    return f"Entry {number}: {'disqualified' if action == 'disqualify' else 'queued for another run'}.", ""


def _number(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise Rejected("schema", "an entry is named by its number")
    return int(text)
