"""The application: choices and measurements over one store.

Every route is here with its page of OpenAPI. Questions for choices are met at the door: the framework's way to a route
takes longer than an answer that is known.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from tilewise.errors import TilewiseError, UnavailableError

try:
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, Response
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
    from starlette.exceptions import HTTPException
    from starlette.types import ASGIApp, Receive, Scope, Send

    from tilewise_fleet.service.service import Service
except ImportError as error:
    raise UnavailableError(f"a service needs {error.name}: pip install tilewise-fleet") from None

from tilewise_fleet.service import models

_STATUS = {"token": 401, "machine": 403, "too large": 413, "rate": 429}
_ABOUT = "Which configuration a kernel should use: from what the fleet has measured, else from the cost model."
_SPELLED = {
    400: "not understood",
    401: "no token, or one that is not known",
    403: "another machine's token",
    413: "too large",
    429: "too much at once",
    503: "the store does not answer now",
}


def create_app(where: str, *, rate: float = 50.0, tokens: bool = True) -> FastAPI:
    """The service over the store at `where`. `rate` is how many requests a second one token may send measurements
    with; without `tokens` anybody may send them, which is for trying things on one machine."""
    service = Service(where, rate, tokens)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(title="tilewise service", description=_ABOUT, version="1", lifespan=lifespan, redoc_url=None)
    _route(app, service)
    app.add_middleware(_Door, service=service)

    async def on_error(_: Request, error: Exception) -> Response:
        return _refusal(service, error)

    app.add_exception_handler(TilewiseError, on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    return app


def _refusals(*codes: int) -> dict[int | str, dict[str, Any]]:
    return {code: {"model": models.Refusal, "description": _SPELLED[code]} for code in codes}


def _takes(model: type[Any], secured: bool = False) -> dict[str, Any]:
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"requestBody": body} | ({"security": [{"token": []}]} if secured else {})


def _route(app: FastAPI, service: Service) -> None:
    @app.post("/choose", response_model=models.Choices, responses=_refusals(400, 413, 503),
              openapi_extra=_takes(models.ChooseRequest))  # fmt: skip
    async def choose(request: Request) -> Response:
        """The configuration to use, at once: measured, or what the model expects; and how sure that is."""
        return await _chosen(service, request)

    @app.post("/measurements", response_model=models.Taken, status_code=201,
              responses=_refusals(400, 401, 403, 413, 429, 503),
              openapi_extra=_takes(models.Measurements, secured=True))  # fmt: skip
    async def measurements(request: Request) -> Response:
        """Add what was measured. Answered when it is in the store."""
        return await service.measurements(request)

    @app.get("/health", response_model=models.Health, responses=_refusals(503))
    async def health() -> models.Health:
        """Whether the store answers, and how much waits for it."""
        await service.from_store(lambda store: store.database.read("SELECT 1"))
        return models.Health(status="ok", store=service.desk.name, waiting=service.desk.backlog)

    @app.get("/metrics", response_class=Response, include_in_schema=False)
    async def metrics() -> Response:
        """For Prometheus."""
        service.meters.waiting.set(service.desk.backlog)
        return Response(generate_latest(service.meters.registry), media_type=CONTENT_TYPE_LATEST)

    made = app.openapi

    def openapi() -> dict[str, Any]:
        document = made()
        parts = document.setdefault("components", {})
        parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for model in (models.ChooseRequest, models.Measurements):
            for name, schema in model.model_json_schema(ref_template="#/components/schemas/{model}")["$defs"].items():
                parts.setdefault("schemas", {}).setdefault(name, schema)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


async def _chosen(service: Service, request: Request) -> Response:
    return Response(await service.choose(request), media_type="application/json")


class _Door:
    """Answers questions for choices itself, and hands on everything else."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/choose" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            answer = await _chosen(self._service, Request(scope, receive))
        except TilewiseError as error:
            answer = _refusal(self._service, error)
        await answer(scope, receive, send)


def _refusal(service: Service, error: Exception) -> Response:
    code = getattr(error, "code", "")
    service.meters.refused.labels(code or "refused").inc()
    status = 503 if isinstance(error, UnavailableError) else _STATUS.get(code, 400)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    if status in (429, 503):
        headers["Retry-After"] = "2"
    if status == 413:
        headers["Connection"] = "close"
    return JSONResponse({"detail": str(error), "code": code or "refused"}, status, headers)


async def _on_invalid(_: Request, error: Exception) -> Response:
    return JSONResponse({"detail": "the request is not understood", "code": "schema"}, 400)


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": str(error.detail), "code": str(error.status_code)}, error.status_code, error.headers)
