"""The FastAPI application: choices and measurements over one store.

All routes and their OpenAPI documentation are here. A middleware answers requests for choices before FastAPI routes
them, because routing takes longer than a cached choice.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from tilewise.errors import TilewiseError, UnavailableError

try:
    from fastapi import FastAPI, Request
    from fastapi.responses import Response
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.types import ASGIApp, Receive, Scope, Send

    from tilewise.web.limits import Limits
    from tilewise.web.routes import add_error_handlers, complete_openapi, describe
    from tilewise_fleet.service.service import ChoiceService
except ImportError as error:
    raise UnavailableError(f"a service needs {error.name}: pip install tilewise-fleet") from None

from tilewise_fleet.service import models
from tilewise_fleet.service.docs_page import STYLE, docs_page

_REQUESTS_PER_RATE = 10.0  # all requests of a client for each that may add measurements; arbitrary
_ABOUT = "The configuration that a kernel should use, from the fleet's measurements or the cost model."


def create_app(where: str, *, rate: float = 50.0, tokens: bool = True) -> Limits:
    """Create the HTTP application over the store at `where`.

    `rate` limits the requests per second that may add measurements with one token; a client may send ten times as many
    requests in all. If `tokens` is false, no token is needed, which is meant for experiments on one machine.
    """
    service = ChoiceService(where, rate, tokens)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        complete_openapi(app, models.ChooseRequest, models.Measurements)
        yield
        service.close()

    app = FastAPI(
        title="tilewise service", description=_ABOUT, version="1", lifespan=lifespan, docs_url=None, redoc_url=None
    )
    _add_routes(app, service)
    app.add_middleware(_ChooseMiddleware, service=service)
    if not tokens:  # a web page can give its own name this machine's address, and would count as the same origin
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", "::1", "[::1]"])
    add_error_handlers(app, service.refuse)
    return Limits(app, service.lookup, _REQUESTS_PER_RATE * rate, service.pulse)


def _add_routes(app: FastAPI, service: ChoiceService) -> None:
    """Add the service's HTTP routes to the application."""

    @app.post("/choose", **describe(models.Choices, 400, 401, 413, takes=models.ChooseRequest))
    async def choose(request: Request) -> Response:
        """Return the configuration to use, measured or from the cost model, and its confidence."""
        return await _choose_response(service, request)

    @app.post(
        "/measurements",
        status_code=201,
        **describe(models.MeasurementCounts, 400, 409, 413, takes=models.Measurements, secured=True),
    )
    async def measurements(request: Request) -> Response:
        """Add measurements; the response is sent after they are committed to the store."""
        return await service.measurements(request)

    @app.get("/health", **describe(models.ServiceHealth))
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


async def _choose_response(service: ChoiceService, request: Request) -> Response:
    return Response(await service.choose(request), media_type="application/json")


class _ChooseMiddleware:
    """Answers requests for choices itself, and passes all others on to the application."""

    def __init__(self, app: ASGIApp, service: ChoiceService) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an ASGI request for choices directly; pass any other request on to the application."""
        if scope["type"] != "http" or scope["path"] != "/choose" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            response = await _choose_response(self._service, Request(scope, receive))
        except TilewiseError as error:
            response = self._service.refuse(error)
        await response(scope, receive, send)
