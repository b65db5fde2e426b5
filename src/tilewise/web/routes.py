"""Helpers for the routes of every service: JSON bodies, error responses, and how OpenAPI describes both.

Routes parse their bodies themselves, after checks that a framework does not make; OpenAPI gets the schemas from here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from tilewise.errors import Rejected, TilewiseError
from tilewise.web.limits import error_facts, status_of

_DESCRIPTIONS = {
    400: "not understood",
    401: "no token, or one that is not known",
    403: "not allowed with this token",
    404: "not there",
    409: "there already, or closed",
    413: "too large",
    429: "too many requests",
    503: "not available at the moment",
}
_SCHEMA_REFERENCE = "#/components/schemas/{model}"


class Refusal(BaseModel):
    """The reason why a request was rejected: a sentence for people, a code for programs."""

    detail: str
    code: str = ""


async def read_json_text(request: Request) -> bytes:
    """Return the body of a JSON request as bytes; its size and time are limited by `Limits`."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise Rejected("schema", "the body must be application/json")
    return await request.body()


def parse_object(content: bytes) -> dict[str, Any]:
    """Parse a body, which must be a JSON object without NaN or infinity."""
    try:
        value = json.loads(content, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Rejected("schema", "the body must be a JSON object")
    return value


def _reject_constant(name: str) -> Any:
    raise ValueError(name)


def describe(
    gives: type[BaseModel] | None,
    *codes: int,
    takes: type[BaseModel] | None = None,
    secured: bool = False,
    refusal: type[BaseModel] = Refusal,
    **more: Any,
) -> dict[str, Any]:
    """Return FastAPI's keyword arguments for a route.

    They declare its response model `gives`, error codes, request body `takes`, and whether it is `secured` by a token.
    """
    codes = (*codes, 429, 503, *((401, 403) if secured else ()))
    responses = {code: {"model": refusal, "description": _DESCRIPTIONS[code]} for code in sorted(set(codes))}
    extra: dict[str, Any] = {"security": [{"token": []}]} if secured else {}
    if takes is not None:
        schema = takes.model_json_schema(ref_template=_SCHEMA_REFERENCE)
        schema.pop("$defs", None)
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    responses |= more.pop("responses", {})
    return {"response_model": gives, "responses": responses, "openapi_extra": extra} | more


def complete_openapi(app: FastAPI, *bodies: type[BaseModel]) -> None:
    """Build and cache the OpenAPI document, with access tokens and the schemas of request `bodies`.

    The framework's own response 422 to invalid parameters is replaced by 400.
    """
    document = app.openapi()
    components = document.setdefault("components", {})
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    for model in bodies:
        definitions = model.model_json_schema(ref_template=_SCHEMA_REFERENCE).get("$defs", {})
        components["schemas"] = definitions | components.get("schemas", {})
    for methods in document["paths"].values():
        for operation in methods.values():
            if operation["responses"].pop("422", None):
                operation["responses"].setdefault("400", {"description": _DESCRIPTIONS[400]})


def error_response(error: TilewiseError) -> JSONResponse:
    """Translate an error into a response with its sentence and code."""
    status = status_of(error)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    if status in (429, 503):
        headers["Retry-After"] = "2"
    return JSONResponse(error_facts(error), status, headers)


def add_error_handlers(
    app: FastAPI,
    answer: Callable[[TilewiseError], Response] = error_response,
    not_found: Callable[[Request], Response | None] = lambda request: None,
) -> None:
    """Make the app answer every error with JSON; `not_found` may return an HTML page instead of a 404."""

    async def on_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, TilewiseError)
        return answer(error)

    async def on_invalid(_: Request, error: Exception) -> Response:
        """Respond to invalid parameters with a 400 that names the first one."""
        assert isinstance(error, RequestValidationError)
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"][1:])
        return JSONResponse({"detail": f"{where}: {problem['msg']}", "code": "schema"}, 400)

    async def on_http_error(request: Request, error: Exception) -> Response:
        """Respond to an HTTP error of the framework, such as 404."""
        assert isinstance(error, HTTPException)
        page = not_found(request) if error.status_code == 404 else None
        body = {"detail": str(error.detail), "code": str(error.status_code)}
        return page or JSONResponse(body, error.status_code, headers=error.headers)

    app.add_exception_handler(TilewiseError, on_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http_error)
