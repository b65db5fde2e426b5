"""The application: the API and the pages over one board, inside the limits.

Nothing here measures anything. Entries go into the queue, and worker processes beside this one take them from there.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from tilewise.errors import UnavailableError
from tilewise_arena.board import open_board

try:
    from fastapi import FastAPI, Request
    from fastapi.responses import Response
    from fastapi.staticfiles import StaticFiles

    from tilewise.web.limits import Limits
    from tilewise.web.routes import add_error_handlers, complete_openapi
    from tilewise_arena.server import admin, api, pages
    from tilewise_arena.server.service import MAX_BODY_BYTES, MOST_STORED, Service
    from tilewise_arena.server.views import Views
    from tilewise_arena.server.writer import BoardWriter
except ImportError as error:
    raise UnavailableError(f"a server needs {error.name}: pip install tilewise-arena") from None

_FOLDER = Path(__file__).parent
_ABOUT = "TinyMLPerf's leaderboard. Entries are recipes; every figure was measured by the board's own workers."


def create_app(
    where: str | Path,
    *,
    most_queued: int = 100,
    most_stored: int = MOST_STORED,
    key: Path | None = None,
    rate: float = 40.0,
    has_truth: bool = False,
    workers: Callable[[], int] | None = None,
) -> Limits:
    """Create the ASGI application over the board at `where` (a file or a database URL).

    `rate` is how many requests a second one client may make in the long run; `has_truth` says that the workers have the
    collection TILE_OLYMPIAD is scored against; `workers` tells how many measuring processes live, for /health.
    """
    board = open_board(where, key=key)
    service = Service(board, BoardWriter(board), most_queued, most_stored, has_truth, workers=workers)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        complete_openapi(app)
        yield
        service.close()

    app = FastAPI(
        title="tilewise board", description=_ABOUT, version="1", lifespan=lifespan, docs_url=None, redoc_url=None
    )
    views = Views(service)
    app.include_router(api.routes(service, views))
    app.include_router(pages.routes(service, views), include_in_schema=False)
    app.include_router(admin.routes(service), include_in_schema=False)
    app.mount("/static", StaticFiles(directory=_FOLDER / "static"), name="static")
    add_error_handlers(app, not_found=_page_for_people)
    return Limits(app, service.lookup, rate, service.pulse, MAX_BODY_BYTES)


def _page_for_people(request: Request) -> Response | None:
    return pages.not_there(request) if "text/html" in request.headers.get("accept", "") else None
