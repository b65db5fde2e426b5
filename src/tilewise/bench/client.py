"""Sending an entry to a server's board: one request, the answer's own sentence where it is refused."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any
from urllib import error, request

from tilewise.bench.errors import Rejected
from tilewise.bench.recipe import Recipe
from tilewise.errors import ConfigurationError, FileFormatError, UnavailableError

_TIMEOUT = 60.0
_MOST_ANSWER = 4 << 20


def submit(url: str, recipe: Recipe, token: str | None, plugin: Path | None = None) -> dict[str, Any]:
    """Put a recipe (or a plugin of the open division) on the board at `url`; gives the receipt."""
    body: dict[str, Any] = {"recipe": recipe.as_dict()}
    if recipe.files:
        contents = {name: recipe.read_file(name).read_bytes() for name in recipe.files}
        body["files"] = {name: base64.b64encode(content).decode() for name, content in contents.items()}
    if plugin is not None:
        body |= {"division": "open", "plugin": plugin.read_text(encoding="utf-8")}
    return call(url, "/api/entries", token, body)


def call(url: str, path: str, token: str | None = None, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """One request to a board's server."""
    token = token or os.environ.get("TILEWISE_TOKEN")
    if body is not None and not token:
        raise ConfigurationError("a server's board needs your team's token: --token, or TILEWISE_TOKEN")
    if not url.startswith(("http://", "https://")):
        raise ConfigurationError(f"a server's address starts with http:// or https://, not {url[:40]!r}")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    data = None if body is None else json.dumps(body).encode()
    asked = request.Request(url.rstrip("/") + path, data=data, headers=headers)
    try:
        with request.urlopen(asked, timeout=_TIMEOUT) as answer:
            return _parsed(answer.read(_MOST_ANSWER), url)
    except error.HTTPError as refused:
        facts = _parsed(refused.read(_MOST_ANSWER), url)
        raise Rejected(str(facts.get("code", refused.code)), str(facts.get("detail", refused.reason))) from None
    except (error.URLError, OSError) as problem:
        raise UnavailableError(f"the board at {url} does not answer: {getattr(problem, 'reason', problem)}") from None


def _parsed(content: bytes, url: str) -> dict[str, Any]:
    try:
        facts = json.loads(content)
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        raise FileFormatError(f"{url} does not answer like a board of tilewise")
    return facts
