"""One client, however hostile, does not stop the board: what it sends is bounded before it costs anything."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from sqlalchemy import insert
from starlette.testclient import TestClient

from tests.bench.site import Served
from tests.bench.test_board import filled, recipe
from tests.bench.test_server import Site
from tests.idle_clients import idle_connections
from tests.waiting import PATIENCE, until
from tilewise.bench import Rejected
from tilewise.bench.jsontext import parse_json
from tilewise.errors import ConfigurationError
from tilewise.web import limits
from tilewise.web.limits import Rates
from tilewise_arena.board import open_board, schema
from tilewise_arena.board.tokens import create_token
from tilewise_arena.server import create_app


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    path = tmp_path / "board.sqlite"
    with open_board(path) as board, TestClient(create_app(path)) as client:
        yield Site(client, board)


# --- JSON ---


@pytest.mark.parametrize("unit", [b'\\"', b'"', b'",', b"\\", b'\\\\"'])
def test_the_check_reads_an_endless_string_once(unit: bytes) -> None:
    """A megabyte: with a check that starts again at every quote this takes an hour, and the test never ends."""
    for head in (b'"', b'{"recipe": "', b'["'):
        with pytest.raises(Rejected):
            parse_json(head + unit * ((1 << 20) // len(unit)), 12 << 20)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"[" + b"1," * 100_000 + b"1]", "too large"),
        (b"[" + b'"",' * 100_000 + b"1]", "too large"),
        (b"[" + b"9" * 5000 + b"]", "schema"),
        (b"[1." + b"9" * 5000 + b"]", "schema"),
        (b"[1e" + b"9" * 500 + b"]", "schema"),
        (b"[" * 13 + b"]" * 13, "too deep"),
        (b'"' + b"\\n" * 500_000 + b'"', "too large"),
        (b'{"a": 1, "a": 2}', "schema"),
        (b'"\xff"', "schema"),
        (b"", "schema"),
    ],
)
def test_size_depth_digits_and_escapes_are_bounded(text: bytes, code: str) -> None:
    with pytest.raises(Rejected) as error:
        parse_json(text, 12 << 20)
    assert error.value.code == code


def test_a_large_file_in_a_request_is_parsed() -> None:
    content = base64.b64encode(bytes(8 << 20)).decode()
    assert parse_json(json.dumps({"files": {"w": content}}).encode(), 12 << 20)["files"]["w"] == content


# --- requests ---


def test_thirty_form_fields_get_a_sentence(site: Site) -> None:
    fields = {f"f{i}": "x" for i in range(30)}
    for path in ("/submit", "/teacher/in", "/teacher/do"):
        answer = site.client.post(path, data=fields)
        assert answer.status_code in (400, 403), path
        assert "at most 20 fields" in answer.text


@pytest.mark.parametrize("cookie", ["ünïcödé", "a.1.ä", "\x80\xff", "x" * 5000])
def test_an_odd_cookie_is_no_teacher_and_no_error(site: Site, cookie: str) -> None:
    header = {"cookie": b"tilewise_teacher=" + cookie.encode()}
    assert "Sign in" in site.client.get("/teacher", headers=header).text
    assert site.client.post("/teacher/do", data={}, headers=header).status_code == 403


def test_an_odd_token_is_unknown_and_no_error(site: Site) -> None:
    header = {"authorization": b"Bearer \xff\xfe\x80"}
    assert site.client.post("/api/entries", json={}, headers=header).status_code == 401


def test_a_stranger_gets_no_place_for_a_large_body(site: Site) -> None:
    large = b"x" * (300 << 10)
    answer = site.client.post("/api/entries", content=large, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (401, "token")
    response = site.client.post("/api/entries", content=large, headers=site.header("owls"))
    assert response.json()["code"] == "schema"


def test_one_client_may_ask_so_often_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_REJECTION_DELAY_SECONDS", 0.0)
    path = tmp_path / "b.sqlite"
    with open_board(path) as board, TestClient(create_app(path, rate=2)) as client:
        site = Site(client, board)
        codes = [client.get("/api/events").status_code for _ in range(20)]
        assert codes[:10] == [200] * 10 and 429 in codes
        assert client.get("/api/events").headers["retry-after"]
        assert client.get("/health").status_code == 200
        response = site.client.get("/api/events", headers=site.header("owls"))
        assert response.status_code == 200  # somebody with a token is counted by it, not by the address


def test_all_addresses_of_one_customer_are_one_client() -> None:
    def client(address: str) -> str:
        return limits._client_key({"client": (address, 1)}, None)

    assert client("2001:db8:1:2::1") == client("2001:db8:1:2:ffff::9") != client("2001:db8:1:3::1")
    assert client("10.0.0.1") != client("10.0.0.2")
    assert client("fe80::1%eth0") == client("fe80::2")


def test_a_bucket_fills_again_with_time() -> None:
    now = [0.0]
    rates = Rates(1.0, 3.0, lambda: now[0])
    assert [rates.take("a") for _ in range(4)] == [True, True, True, False]
    assert rates.take("b")
    now[0] = 2.0
    assert [rates.take("a") for _ in range(3)] == [True, True, False]


def test_every_request_is_a_line_in_the_log(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="tilewise.access"):
        site.post("/api/entries", {"recipe": recipe()})
        site.client.get("/nothing%0Ahere")
    lines = [r.getMessage() for r in caplog.records if r.name == "tilewise.access"]
    identifier = site.tokens["owls"].split("_")[1]
    assert f" {identifier} POST /api/entries 201 " in lines[0]
    assert site.tokens["owls"] not in "".join(lines)
    assert len(lines) == 2 and "\n" not in lines[1]


# --- the teacher ---


def test_signing_out_ends_the_session_wherever_its_cookie_is(site: Site) -> None:
    site.client.post("/teacher/in", data={"token": site.tokens["teacher"]})
    cookie = site.client.cookies["tilewise_teacher"]
    site.client.post("/teacher/out")
    site.client.cookies.set("tilewise_teacher", cookie, path="/teacher")
    assert "Sign in" in site.client.get("/teacher").text
    assert site.client.post("/teacher/do", data={"action": "open", "event": "MLP_SPRINT"}).status_code == 403


def test_a_session_written_into_the_database_signs_nobody_in(site: Site) -> None:
    teacher = site.tokens["teacher"].split("_")[1]
    forged = hashlib.sha256(b"session guess").hexdigest()
    with site.board.write() as transaction:
        row = {"hash": forged, "token": teacher, "until": time.time() + 3600}
        transaction.connection.execute(insert(schema.sessions).values(**row))
    assert "Sign in" in site.client.get("/teacher", headers={"cookie": "tilewise_teacher=guess"}).text


def test_a_revoked_token_signs_its_holder_out(site: Site) -> None:
    site.client.post("/teacher/in", data={"token": site.tokens["teacher"]})
    identifier = site.tokens["teacher"].split("_")[1]
    site.client.delete(f"/api/tokens/{identifier}", headers=site.header("teacher"))
    assert "Sign in" in site.client.get("/teacher").text


def test_a_teacher_signs_in_behind_a_proxy_that_changes_the_host(site: Site) -> None:
    outside = {"origin": "https://board.example", "host": "127.0.0.1:8000"}
    answer = site.client.post(
        "/teacher/in", data={"token": site.tokens["teacher"]}, headers=outside, follow_redirects=False
    )
    assert answer.status_code == 303
    assert "secure" in answer.headers["set-cookie"].lower()
    secret = answer.headers["set-cookie"].split("=")[1].split(";")[0]
    foreign_headers = outside | {"cookie": f"tilewise_teacher={secret}"}
    token = re.search(r'name="form" value="([0-9a-f]+)"', site.client.get("/teacher", headers=foreign_headers).text)
    assert token is not None
    action = {"action": "close", "event": "MLP_SPRINT"}
    assert site.client.post("/teacher/do", data=action, headers=foreign_headers).status_code == 403
    done = site.client.post("/teacher/do", data=action | {"form": token[1]}, headers=foreign_headers)
    assert "MLP_SPRINT is closed." in done.text
    foreign = foreign_headers | {"sec-fetch-site": "cross-site"}
    assert site.client.post("/teacher/do", data=action | {"form": token[1]}, headers=foreign).status_code == 403


def test_what_a_teacher_does_on_the_page_bears_their_name(site: Site) -> None:
    site.client.post("/teacher/in", data={"token": site.tokens["teacher"]})
    site.client.post("/teacher/do", data={"action": "close", "event": "MLP_SPRINT"})
    last = list(site.board.links())[-1]
    assert json.loads(last.body)["by"] == site.tokens["teacher"].split("_")[1]


# --- pages ---


def test_lists_come_in_pages_that_lead_on(site: Site) -> None:
    numbers = filled(site.board, 5)
    entry_numbers: list[int] = []
    offset: int | None = 0
    while offset is not None:
        page = site.client.get(f"/api/entries?limit=2&offset={offset}").json()
        assert page["total"] == 5
        entry_numbers += [entry["id"] for entry in page["entries"]]
        offset = page["next"]
    assert entry_numbers == numbers[::-1]


def test_a_board_page_shows_fifty_entries_with_their_places(site: Site) -> None:
    numbers = filled(site.board, 60)
    with site.board.write() as transaction:
        transaction.disqualify(numbers[-1], "because it is")
    first = site.client.get("/board/MLP_SPRINT").text
    second = site.client.get("/board/MLP_SPRINT?number=2").text
    assert first.count('class="num rank"') == 50 and second.count('class="num rank"') == 10
    assert 'data-label="Rank">1<' in first and 'data-label="Rank">59<' in second
    assert "page 2 of 2" in second and "60 entries" in second
    assert site.client.get("/board/MLP_SPRINT?number=999&sort=x&team=%00").status_code == 200


def test_an_unchanged_page_is_not_sent_twice(site: Site) -> None:
    filled(site.board, 2)
    for path in ("/", "/board/MLP_SPRINT", "/api/entries", "/api/records?event=MLP_SPRINT"):
        tag = site.client.get(path).headers["etag"]
        again = site.client.get(path, headers={"if-none-match": tag})
        assert (again.status_code, again.content) == (304, b"")
    with site.board.write() as transaction:
        transaction.submit("rooks", recipe("more"))
    changed = site.client.get("/api/entries", headers={"if-none-match": tag})
    assert changed.status_code == 200 and changed.json()["total"] == 3


def test_a_crowd_has_a_page_made_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []
    real = type(site.board).standings

    def count_call(*args: Any, **options: Any) -> Any:
        numbers.append(1)
        return real(*args, **options)

    monkeypatch.setattr(type(site.board), "standings", count_call)
    for at in range(10):
        assert site.client.get(f"/board/MLP_SPRINT?unknown={at}").status_code == 200
    assert len(numbers) == 1


# --- a real server ---


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, str]]:
    folder = tmp_path_factory.mktemp("hostile")
    path, key = folder / "board.sqlite", folder / "board.key"
    with open_board(path, key=key) as board:
        token = create_token(board, "owls")
    server = Served(str(path), key)
    try:
        yield server, token
    finally:
        server.stop()


def _healthy(server: Served, timeout: float = PATIENCE) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout)
    connection.request("GET", "/health")
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status == 200


def _raw(server: Served, content: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    connection.sendall(content)
    return connection


def test_idle_connections_push_out_each_other_and_nobody_else(served: tuple[Served, str]) -> None:
    server, _ = served
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(idle_connections(server.port))
            assert _healthy(server)


def test_half_sent_bodies_of_strangers_hold_nothing(served: tuple[Served, str]) -> None:
    server, token = served
    head = "POST /api/entries HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 5000000\r\n"
    strangers = [_raw(server, f"{head}\r\n".encode() + b"x" * 1000) for _ in range(20)]
    sockets = [_raw(server, f"{head}authorization: Bearer {token}\r\n\r\n".encode() + b"x") for _ in range(3)]
    try:
        assert all(b" 401 " in connection.recv(200) for connection in strangers)
        answered = select.select(sockets, [], [], PATIENCE)[0]
        assert answered and all(b" 429 " in connection.recv(200) for connection in answered)
        assert _healthy(server)
    finally:
        for connection in strangers + sockets:
            connection.close()


def test_a_hostile_text_leaves_the_board_answering(served: tuple[Served, str]) -> None:
    server, token = served
    bomb = b'{"recipe": "' + b'\\"' * 120_000
    connections = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE) for _ in range(4)]
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    for connection in connections:
        connection.request("POST", "/api/entries", bomb, headers)
    assert _healthy(server)
    assert {connection.getresponse().status for connection in connections} <= {400, 413}


def test_health_is_told_at_the_door_and_everything_else_inside(served: tuple[Served, str]) -> None:
    server, _ = served
    assert _healthy(server)
    ask = b"GET /health HTTP/1.1\r\nhost: x\r\n"
    connection = _raw(server, ask + b"\r\n")
    for more in (b"", b"connection: keep-alive\r\n", b"connection: close\r\n"):
        response = connection.recv(4096)
        assert response.startswith(b"HTTP/1.1 200") and b'"status": "ok"' in response and b"nosniff" in response
        connection.sendall(ask + more + b"\r\n")
    assert b'"status": "ok"' in connection.recv(4096) and connection.recv(10) == b""
    half = _raw(server, ask)
    half.sendall(b"\r\n")
    assert half.recv(200).startswith(b"HTTP/1.1 200")


def _all_of(connection: socket.socket) -> bytes:
    content = b""
    while piece := connection.recv(1 << 16):
        content += piece
    return content


def test_one_request_at_a_time_is_heard_on_a_connection(served: tuple[Served, str]) -> None:
    server, _ = served
    first = b"GET /api/events HTTP/1.1\r\nhost: x\r\n\r\n"
    responses = _all_of(_raw(server, first + b"GET /api/head HTTP/1.1\r\nhost: x\r\n\r\n" * 3000))
    assert responses.count(b"HTTP/1.1 200") == 1 and b"MLP_SPRINT" in responses
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    for _ in range(3):
        connection.request("GET", "/api/events")
        assert b"MLP_SPRINT" in connection.getresponse().read()


@pytest.mark.parametrize("end", [b"\r\n", b"\n"])
def test_a_body_in_chunks_is_not_read(served: tuple[Served, str], end: bytes) -> None:
    server, token = served
    lines = [b"POST /api/entries HTTP/1.1", b"host: x", b"Transfer-Encoding: chunked", b"authorization: Bearer "]
    head = end.join([*lines[:3], lines[3] + token.encode(), b"", b""])
    hostile = [_raw(server, head + b"1\r\na\r\n" * 5000) for _ in range(20)]
    assert _healthy(server)
    assert all(connection.recv(20).startswith(b"HTTP/1.1 411") for connection in hostile)
    keep_alive = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    keep_alive.request("GET", "/api/head")
    assert keep_alive.getresponse().read() and keep_alive.sock is not None
    keep_alive.sock.sendall(head)
    assert b" 411 " in _all_of(keep_alive.sock)


def test_a_head_of_very_many_lines_is_not_parsed(served: tuple[Served, str]) -> None:
    server, _ = served
    connection = _raw(server, b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a:b\r\n" * 3000 + b"\r\n")
    assert connection.recv(20).startswith(b"HTTP/1.1 431")
    body = b"{" + b"\n" * 4000 + b"}"  # lines of a body are no lines of a head
    head = b"POST /api/entries HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    assert _raw(server, head + body).recv(20).startswith(b"HTTP/1.1 401")


def test_a_head_of_very_many_cookies_is_not_parsed(served: tuple[Served, str]) -> None:
    server, _ = served
    for cookies, status in ((1000, b"HTTP/1.1 431"), (50, b"HTTP/1.1 200")):
        line = b"cookie: " + b"; ".join(b"a%d=b" % at for at in range(cookies))
        assert _raw(server, b"GET /api/head HTTP/1.1\r\nhost: x\r\n" + line + b"\r\n\r\n").recv(20).startswith(status)


def test_nobody_works_for_those_who_did_not_wait() -> None:
    worked: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        worked.append(1)
        await asyncio.sleep(0.01)
        await limits._send_json(send, 200, {})

    async def nobody(_: str) -> None:
        return None

    async def disconnected_client() -> Any:
        return {"type": "http.disconnect"}

    async def quiet(_: Any) -> None:
        return None

    async def crowd() -> None:
        guard = limits.Limits(app, nobody, 0.0)
        scope = {"type": "http", "method": "GET", "path": "/x", "headers": [], "client": ("10.0.0.1", 1)}
        await asyncio.gather(*(guard(dict(scope), disconnected_client, quiet) for _ in range(600)))
        assert guard._queues == {}

    asyncio.run(crowd())
    assert worked == []


def test_one_client_has_a_few_requests_worked_on_at_once() -> None:
    working, most = [0], [0]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        working[0] += 1
        most[0] = max(most[0], working[0])
        await asyncio.sleep(0.01)
        working[0] -= 1
        await limits._send_json(send, 200, {})

    async def nobody(_: str) -> None:
        return None

    async def empty_request() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def quiet(_: Any) -> None:
        return None

    async def crowd() -> None:
        guard = limits.Limits(app, nobody, 0.0)
        scope = {"type": "http", "method": "GET", "path": "/x", "headers": [], "client": ("10.0.0.1", 1)}
        await asyncio.gather(*(guard(dict(scope), empty_request, quiet) for _ in range(20)))
        assert guard._queues == {}

    asyncio.run(crowd())
    assert most[0] == limits._MAX_ACTIVE_PER_CLIENT


def test_headers_without_end_are_cut_off(served: tuple[Served, str]) -> None:
    server, _ = served
    connection = _raw(server, b"GET / HTTP/1.1\r\n" + b"x-a: " + b"a" * (64 << 10))
    assert connection.recv(200)[:12] in (b"HTTP/1.1 400", b"")
    assert _healthy(server)


def test_a_server_ends_when_told_whatever_its_clients_do(tmp_path: Path) -> None:
    path, key = tmp_path / "board.sqlite", tmp_path / "board.key"
    server = Served(str(path), key)
    stuck = [_raw(server, b"POST /submit HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\nx") for _ in range(5)]
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE) is not None
    for connection in stuck:
        connection.close()


def test_workers_are_started_again_and_end_with_their_server(tmp_path: Path) -> None:
    path, key = tmp_path / "board.sqlite", tmp_path / "board.key"
    server = Served(str(path), key, workers=1)
    try:
        first = server.workers()
        assert len(first) == 1
        os.kill(first[0], signal.SIGKILL)
        second = until(lambda: [pid for pid in server.workers() if pid not in first])
        assert len(second) == 1
    finally:
        server.kill()  # not asked, killed: its workers notice by themselves
    assert until(lambda: not Path(f"/proc/{second[0]}").exists() or _is_zombie(second[0]))


def _is_zombie(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


def test_a_taken_port_and_an_address_for_a_file_are_sentences(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        command = [sys.executable, "-m", "tilewise.cli.app", "compete", "serve", "--workers", "0", "--port", str(port)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "nothing can listen" in done.stderr + done.stdout
    with pytest.raises(ConfigurationError, match="http://localhost:8741"):
        open_board("localhost:8741")
    assert not (tmp_path / "localhost:8741").exists()


def test_a_server_on_any_free_port_says_where_it_is(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tilewise.cli.app", "compete", "serve", "--workers", "0", "--port", "0"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        address = re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())
        assert address is not None and address[1] != "0"
    finally:
        process.terminate()
    assert process.wait(PATIENCE) == 0
    process.stdout.close()


def test_what_tells_a_server_to_end_before_it_runs_is_not_lost(tmp_path: Path) -> None:
    """Nothing is raised, since an exception at the wrong moment would be dropped; the server looks before it waits."""
    from tilewise.web.connections import GuardedServer
    from tilewise_arena.server import create_app

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    app = create_app(str(tmp_path / "board.sqlite"), key=tmp_path / "board.key")
    for number in before:
        listening = socket.create_server(("127.0.0.1", 0))
        server = GuardedServer(app, listening)
        try:
            server.stop_on_signals()
            signal.raise_signal(number)
            server.run(sockets=[])
        finally:
            for signal_number, handler in before.items():
                signal.signal(signal_number, handler)
        assert listening.fileno() == -1
