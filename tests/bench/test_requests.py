"""Requests with a second meaning: what two programs could read in two ways is refused; forms come from this site."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from starlette.testclient import TestClient

from tests.bench.site import Served
from tests.bench.test_board import recipe
from tests.bench.test_server import Site
from tilewise_arena.board import open_board
from tilewise_arena.board.tokens import create_token
from tilewise_arena.server import create_app

BODY = json.dumps({"recipe": recipe("x")}).encode()
LENGTH = b"content-length: %d\r\n" % len(BODY)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, str]]:
    folder = tmp_path_factory.mktemp("requests")
    with open_board(folder / "board.sqlite", key=folder / "board.key") as board:
        token = create_token(board, "owls")
    server = Served(str(folder / "board.sqlite"), folder / "board.key")
    try:
        yield server, token
    finally:
        server.stop()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with open_board(tmp_path / "board.sqlite") as board, TestClient(create_app(tmp_path / "board.sqlite")) as client:
        yield Site(client, board)


def _answers(server: Served, content: bytes) -> bytes:
    """Everything that comes back until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(content)
        received = b""
        while piece := connection.recv(1 << 16):
            received += piece
        return received


@pytest.mark.parametrize(
    "lines",
    [
        LENGTH + b"content-length: 3\r\n",
        b"content-length: +%d\r\n" % len(BODY),
        b"content-length: 0x40\r\n",
        LENGTH + b"transfer-encoding : chunked\r\n",
        LENGTH + b"transfer-encoding:\tchunked\r\n",
        LENGTH + b"Transfer-Encoding: identity\r\n",
        LENGTH + b"x: a\rtransfer-encoding: chunked\r\n",
        LENGTH + b"x: a\0b\r\n",
        LENGTH + b"host: another\r\n",
    ],
)
def test_a_head_with_two_readings_enters_nothing(served: tuple[Served, str], lines: bytes) -> None:
    server, token = served
    head = b"POST /api/entries HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    head += b"authorization: Bearer " + token.encode() + b"\r\n"
    assert _answers(server, head + lines + b"\r\n" + BODY).startswith((b"HTTP/1.1 400", b"HTTP/1.1 411"))


def test_a_request_hidden_behind_a_body_is_not_heard(served: tuple[Served, str]) -> None:
    server, _ = served
    hidden = b"GET /api/head HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    responses = _answers(server, b"POST /api/entries HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nabcd" + hidden)
    assert responses.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_no_other_protocol_is_spoken(served: tuple[Served, str], protocol: bytes) -> None:
    server, _ = served
    head = b"GET /api/head HTTP/1.1\r\nhost: x\r\nconnection: upgrade, close\r\nupgrade: " + protocol + b"\r\n\r\n"
    responses = _answers(server, head)
    assert b"101 Switching" not in responses
    assert b"101 Switching" not in _answers(server, b"PRI * HTTP/2.0\r\nhost: x\r\n\r\nSM\r\n\r\n")


def test_a_packed_body_is_not_unpacked(site: Site) -> None:
    packed = gzip.compress(b'{"recipe": ' + b" " * (64 << 20))
    headers = site.header("owls") | {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    answer = site.client.post("/api/entries", content=packed, headers=headers)
    assert answer.status_code == 400 and answer.json()["detail"] == "this is not JSON"


@pytest.mark.parametrize("path", ["../app.py", "%2e%2e/app.py", "..%2f..%2f..%2fetc/passwd", "/etc/passwd", "x%00.css"])
def test_no_path_leads_out_of_the_static_files(served: tuple[Served, str], path: str) -> None:
    server, _ = served
    head = f"GET /static/{path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
    assert _answers(server, head).startswith(b"HTTP/1.1 404")


@pytest.mark.parametrize(
    "name", ["\u202eevil", "a\u200bb", "e" + "\u0301" * 60, "\ud800", "a\r\nset-cookie: x=1", "\u2028"]
)
def test_a_name_stays_in_its_line(site: Site, name: str) -> None:
    content = json.dumps({"recipe": recipe("x") | {"name": name}})
    headers = site.header("owls") | {"Content-Type": "application/json"}
    assert site.client.post("/api/entries", content=content, headers=headers).status_code == 400
    assert site.post("/api/entries", {"recipe": recipe("naïve Ởwls e\u0301\u0323")}).status_code == 201


ELSEWHERE = [
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"origin": "http://testserver.evil.example"},
    {"origin": "http://testserver@evil.example"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site", "origin": "http://testserver"},
]


@pytest.mark.parametrize("headers", ELSEWHERE)
def test_what_another_site_sends_in_a_teachers_browser_is_not_done(site: Site, headers: dict[str, str]) -> None:
    site.client.post("/teacher/in", data={"token": site.tokens["teacher"]})
    answer = site.client.post("/teacher/do", data={"action": "close", "event": "MLP_SPRINT"}, headers=headers)
    assert answer.status_code == 403
    assert site.board.open_events().get("MLP_SPRINT", True)


def test_another_site_does_not_sign_a_teacher_out(site: Site) -> None:
    site.client.post("/teacher/in", data={"token": site.tokens["teacher"]})
    answer = site.client.post("/teacher/out", headers={"sec-fetch-site": "cross-site"})
    assert answer.status_code == 403 and "set-cookie" not in answer.headers
    assert "Sign out" in site.client.get("/teacher").text


def test_a_session_brought_along_is_not_the_one_that_is_signed_in(site: Site) -> None:
    site.client.cookies.set("tilewise_teacher", "known-to-another", path="/teacher")
    answer = site.client.post("/teacher/in", data={"token": site.tokens["teacher"]}, follow_redirects=False)
    assert "known-to-another" not in answer.headers["set-cookie"]
    site.client.cookies.clear()
    site.client.cookies.set("tilewise_teacher", "known-to-another", path="/teacher")
    assert "Sign in" in site.client.get("/teacher").text


def test_a_teachers_page_is_kept_by_no_browser(site: Site) -> None:
    site.client.post("/teacher/in", data={"token": site.tokens["teacher"]})
    for answer in (site.client.get("/teacher"), site.client.get("/teacher/grades.csv")):
        assert answer.headers["cache-control"] == "no-store"
    assert site.client.get("/").headers["cache-control"] == "no-cache"
