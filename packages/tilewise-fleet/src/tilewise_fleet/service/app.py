"""The FastAPI application: choices and measurements over one store.

All routes and their OpenAPI documentation are here. A middleware answers requests for choices before FastAPI routes
them, because routing takes longer than a cached choice.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from functools import lru_cache
from typing import Any

from tilewise.errors import TilewiseError, UnavailableError

try:
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, Response
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
    from starlette.exceptions import HTTPException
    from starlette.types import ASGIApp, Receive, Scope, Send

    from tilewise.web.limits import Limits
    from tilewise_fleet.service.service import ChoiceService
except ImportError as error:
    raise UnavailableError(f"a service needs {error.name}: pip install tilewise-fleet") from None

from tilewise_fleet.service import models
from tilewise_fleet.service.docs_page import STYLE, docs_page

_STATUS = {"token": 401, "machine": 403, "conflict": 409, "too large": 413, "rate": 429}
_REQUESTS_PER_RATE = 10.0  # all requests of a client for each that may add measurements; arbitrary
_ABOUT = "The configuration that a kernel should use, from the fleet's measurements or the cost model."
_DESCRIPTIONS = {
    400: "invalid request",
    401: "missing or unknown token",
    403: "token of another machine",
    409: "the uid of a batch belongs to other measurements",
    413: "too large",
    429: "too many requests",
    503: "the store is not available",
}


def create_app(where: str, *, rate: float = 50.0, tokens: bool = True) -> Limits:
    """Create the application over the store at `where`.

    `rate` limits the requests per second that may add measurements with one token; a client may send ten times as many
    requests in all. If `tokens` is false, no token is needed, which is meant for experiments on one machine.
    """
    service = ChoiceService(where, rate, tokens)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.openapi()  # takes long, and is cached
        yield
        service.close()

    app = FastAPI(
        title="tilewise service", description=_ABOUT, version="1", lifespan=lifespan, docs_url=None, redoc_url=None
    )
    _add_routes(app, service)
    app.add_middleware(_ChooseMiddleware, service=service)

    async def on_error(_: Request, error: Exception) -> Response:
        return _error_response(service, error)

    app.add_exception_handler(TilewiseError, on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    return Limits(app, service.lookup, _REQUESTS_PER_RATE * rate, service.pulse)


def _error_models(*codes: int) -> dict[int | str, dict[str, Any]]:
    return {code: {"model": models.Refusal, "description": _DESCRIPTIONS[code]} for code in codes}


def _request_body(model: type[Any], secured: bool = False) -> dict[str, Any]:
    """Describe a request body for OpenAPI; the routes parse their bodies themselves."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"requestBody": body} | ({"security": [{"token": []}]} if secured else {})


def _add_routes(app: FastAPI, service: ChoiceService) -> None:
    """Add the routes, and the schemas of request bodies to the OpenAPI document."""

    @app.post("/choose", response_model=models.Choices, responses=_error_models(400, 401, 413, 429, 503),
              openapi_extra=_request_body(models.ChooseRequest))  # fmt: skip
    async def choose(request: Request) -> Response:
        """Return the configuration to use, measured or from the cost model, and its confidence."""
        return await _choose_response(service, request)

    @app.post("/measurements", response_model=models.MeasurementCounts, status_code=201,
              responses=_error_models(400, 401, 403, 409, 413, 429, 503),
              openapi_extra=_request_body(models.Measurements, secured=True))  # fmt: skip
    async def measurements(request: Request) -> Response:
        """Add measurements; the response is sent after they are committed to the store."""
        return await service.measurements(request)

    @app.get("/health", response_model=models.ServiceHealth, responses=_error_models(503))
    async def health() -> models.ServiceHealth:
        """Report whether the store answers, and how many requests wait for it."""
        return models.ServiceHealth(**await service.pulse.check())

    @app.get("/metrics", response_class=Response, include_in_schema=False)
    async def metrics() -> Response:
        """Return the metrics for Prometheus."""
        service.meters.waiting.set(service.store_thread.backlog)
        return Response(generate_latest(service.meters.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/docs", response_class=Response, include_in_schema=False)
    async def docs(request: Request) -> Response:
        """Show the routes with example requests."""
        return Response(docs_page(app.openapi(), str(request.base_url)), media_type="text/html")

    @app.get("/docs.css", response_class=Response, include_in_schema=False)
    async def docs_style() -> Response:
        """Return the style of /docs, which the content security policy forbids inside the page."""
        return Response(STYLE, media_type="text/css")

    build_openapi = app.openapi

    @lru_cache(maxsize=1)
    def openapi() -> dict[str, Any]:
        document = build_openapi()
        components = document.setdefault("components", {})
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for model in (models.ChooseRequest, models.Measurements):
            for name, schema in model.model_json_schema(ref_template="#/components/schemas/{model}")["$defs"].items():
                components.setdefault("schemas", {}).setdefault(name, schema)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


async def _choose_response(service: ChoiceService, request: Request) -> Response:
    return Response(await service.choose(request), media_type="application/json")


class _ChooseMiddleware:
    """Answers requests for choices itself, and passes all others on to the application."""

    def __init__(self, app: ASGIApp, service: ChoiceService) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/choose" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            response = await _choose_response(self._service, Request(scope, receive))
        except TilewiseError as error:
            response = _error_response(self._service, error)
        await response(scope, receive, send)


def _error_response(service: ChoiceService, error: Exception) -> Response:
    """Translate an error into a response with its message and code, and count it."""
    code = getattr(error, "code", "")
    service.meters.rejections.labels(code or "refused").inc()
    status = 503 if isinstance(error, UnavailableError) else _STATUS.get(code, 400)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    if status in (429, 503):
        headers["Retry-After"] = "2"
    if status == 413:
        headers["Connection"] = "close"
    return JSONResponse({"detail": str(error), "code": code or "refused"}, status, headers)


async def _on_invalid(_: Request, error: Exception) -> Response:
    return JSONResponse({"detail": "the request is invalid", "code": "schema"}, 400)


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": str(error.detail), "code": str(error.status_code)}, error.status_code, error.headers)
