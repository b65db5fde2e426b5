"""The page /docs of the service: routes with example requests, as plain HTML that loads nothing from other hosts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 0 auto; padding: 1rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 0.85rem; }
pre { padding: 0.75rem; border: 1px solid #8888; border-radius: 6px; }
h2 { margin-top: 2.5rem; }
"""


def docs_page(document: dict[str, Any], address: str) -> str:
    """Format an OpenAPI document as an HTML page; example requests are sent to `address`."""
    title = escape(document["info"]["title"])
    words = "".join(
        _route(document, f"{address.rstrip('/')}{path}", method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f'<title>{title}</title><link rel="icon" href="data:,"><link rel="stylesheet" href="/docs.css"></head>'
        f"<body><h1>{title}</h1>"
        f"<p>{escape(document['info']['description'])} Programs read <a href='/openapi.json'>/openapi.json</a>.</p>"
        f"{words}</body></html>\n"
    )


def _route(document: dict[str, Any], url: str, method: str, operation: dict[str, Any]) -> str:
    """Format one route as HTML: its description, an example request for a shell, and its status codes."""
    path = url.split("/", 3)[3]
    codes = "".join(f"<li>{code}: {escape(r['description'])}</li>" for code, r in operation["responses"].items())
    words = [f"curl {url}"]
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if operation.get("security"):
        words.append("-H 'authorization: Bearer TOKEN'")
    if schema:
        example = next(iter(schema.get("examples", [])), None) or dict(_example_fields(document, schema))
        words += ["-H 'content-type: application/json'", f"-d '{json.dumps(example)}'"]
    command = escape(" \\\n  ".join(words))
    return (
        f"<h2>{method.upper()} /{escape(path)}</h2><p>{escape(operation.get('description', ''))}</p>"
        f"<pre>{command}</pre><ul>{codes}</ul>"
    )


def _example_fields(document: dict[str, Any], schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the required fields of an object, with the examples of their schemas."""
    for name in schema.get("required", []):
        yield name, _example(document, schema["properties"][name])


def _example(document: dict[str, Any], schema: dict[str, Any]) -> Any:
    """Build an example value of a JSON schema: its first example, or a value of its type."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "examples" in schema:
        return schema["examples"][0]
    if schema.get("type") == "array":
        return [_example(document, schema["items"])]
    if schema.get("type") == "object":
        return dict(_example_fields(document, schema))
    return schema.get("enum", [{"number": 1000.0, "integer": 64}.get(schema.get("type", ""), "text")])[0]
