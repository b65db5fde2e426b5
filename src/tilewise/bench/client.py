"""Sending an entry to a server's board: one request, the answer's own sentence where it is refused."""

from __future__ import annotations

import base64
import json
import os
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib import error, parse, request

from tilewise._files import read_text_input
from tilewise.bench.recipe import MOST_FILE_BYTES, Recipe
from tilewise.errors import ConfigurationError, FileFormatError, Rejected, UnavailableError

_TIMEOUT_SECONDS = 60.0
_MAX_ANSWER_BYTES = 4 << 20


def submit(url: str, recipe: Recipe, token: str | None, plugin: Path | None = None) -> dict[str, Any]:
    """Submit a recipe (or a plugin of the open division) to the board at `url`, and return the receipt."""
    body: dict[str, Any] = {"recipe": recipe.as_dict()}
    if recipe.files:
        contents = {name: recipe.file_content(name) for name in recipe.files}
        body["files"] = {name: base64.b64encode(content).decode() for name, content in contents.items()}
    if plugin is not None:
        body |= {"division": "open", "plugin": read_text_input(plugin, MOST_FILE_BYTES)}
    return call(url, "/api/entries", token, body)


def standings(url: str, event: str, division: str, limit: int) -> list[dict[str, Any]]:
    """Return the best entries of an event on the board at `url`; no token is needed."""
    answer = call(url, f"/api/standings?{parse.urlencode({'event': event, 'division': division, 'limit': limit})}")
    rows = answer.get("entries")
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and row.keys() >= _ROW_FIELDS.keys() for row in rows
    ):
        raise FileFormatError(f"{url} does not answer like a board of tilewise")
    return [{name: plain(row[name]) for name, plain in _ROW_FIELDS.items()} for row in rows]


def _text(value: Any) -> str:
    return "".join(c if c.isprintable() else "?" for c in str(value)[:200])


def _figure(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e15 else None


_ROW_FIELDS: dict[str, Any] = dict.fromkeys(("team", "name", "status", "submitted_at"), _text) | {"record": bool}
_ROW_FIELDS |= dict.fromkeys(("score", "speedup", "memory_gain", "size_gain"), _figure)
_ROW_FIELDS |= {"id": lambda value: int(_figure(value) or 0), "rank": lambda value: int(_figure(value) or 0) or None}


def call(url: str, path: str, token: str | None = None, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Send one request to a board's server, a POST if there is a body, and return the parsed response."""
    token = token or os.environ.get("TILEWISE_TOKEN")
    if body is not None and not token:
        raise ConfigurationError("a server's board needs your team's token: --token, or TILEWISE_TOKEN")
    if not url.startswith(("http://", "https://")):
        raise ConfigurationError(f"a server's address starts with http:// or https://, not {url[:40]!r}")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        http_request = request.Request(url.rstrip("/") + path, data=data, headers=headers)
    except ValueError as problem:  # half an IPv6 address
        raise ConfigurationError(f"{url[:80]!r} is not an address: {problem}") from None
    try:
        with request.urlopen(http_request, timeout=_TIMEOUT_SECONDS) as answer:
            return _parse_answer(answer.read(_MAX_ANSWER_BYTES), url)
    except error.HTTPError as http_error:
        facts = _parse_answer(http_error.read(_MAX_ANSWER_BYTES), url)
        raise Rejected(str(facts.get("code", http_error.code)), str(facts.get("detail", http_error.reason))) from None
    except (error.URLError, OSError, HTTPException) as problem:  # HTTPException: the other side is not a web server
        raise UnavailableError(f"the board at {url} does not answer: {getattr(problem, 'reason', problem)}") from None


def _parse_answer(content: bytes, url: str) -> dict[str, Any]:
    """Parse a board's response, which must be a JSON object; raise `FileFormatError` otherwise."""
    try:
        facts = json.loads(content)
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict):
        raise FileFormatError(f"{url} does not answer like a board of tilewise")
    return facts
