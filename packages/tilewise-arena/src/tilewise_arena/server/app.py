"""The application: the API and the pages over one board, inside the limits.

Nothing here measures anything. Entries go into the queue, and worker processes beside this one take them from there.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from tilewise.errors import TilewiseError, UnavailableError
from tilewise_arena.board import open_board

try:
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, Response
    from fastapi.staticfiles import StaticFiles
    from starlette.exceptions import HTTPException

    from tilewise.web.limits import Limits
    from tilewise_arena.server import admin, api, pages
    from tilewise_arena.server.service import MOST_STORED, Service, on_error
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
    """Create the server's application over the board at `where` (a file or a database URL).

    `rate` is how many requests a second one client may make in the long run; `has_truth` says that the workers have
    the collection TILE_OLYMPIAD is scored against; `workers` tells how many measuring processes live, for /health.
    """
    board = open_board(where, key=key)
    service = Service(board, BoardWriter(board), most_queued, most_stored, has_truth, workers=workers)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
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
    app.add_exception_handler(TilewiseError, on_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    _document(app)
    return Limits(app, service.lookup, rate, service.pulse)


def _document(app: FastAPI) -> None:
    """Build the OpenAPI document with the token as a security scheme, and without the framework's own 422."""
    build_openapi = app.openapi

    def openapi() -> dict[str, Any]:
        document = build_openapi()
        components = document.setdefault("components", {})
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for methods in document["paths"].values():
            for operation in methods.values():
                if operation["responses"].pop("422", None) and "400" not in operation["responses"]:
                    operation["responses"]["400"] = {"description": "not understood"}
        return document

    app.openapi = openapi  # type: ignore[method-assign]


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"][1:])
    return JSONResponse({"detail": f"{where}: {problem['msg']}", "code": "schema"}, 400)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404 and "text/html" in request.headers.get("accept", ""):
        return pages.not_there(request)
    body = {"detail": str(error.detail), "code": str(error.status_code)}
    return JSONResponse(body, error.status_code, headers=error.headers)
