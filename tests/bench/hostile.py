"""Single hostile clients, each a function that does its worst to a served board until told to stop.

They run in processes of their own; see `bars`, which looks how the board does meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

Attack = Callable[["Target"], None]
ATTACKS: dict[str, Attack] = {}


class Target:
    """The board's port, a student's token, and when to stop."""

    def __init__(self, port: int, token: str, seconds: float, connected: Any = None) -> None:
        self.port, self.token, self.until, self.connected = port, token, time.monotonic() + seconds, connected

    @property
    def open(self) -> bool:
        return time.monotonic() < self.until

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=5)
        if self.connected is not None:
            self.connected.set()
        return connection

    def head(self, method: str, path: str, length: int | None = None, has_token: bool = True, more: str = "") -> bytes:
        lines = [f"{method} {path} HTTP/1.1", "host: x", "content-type: application/json"]
        lines += [f"authorization: Bearer {self.token}"] if has_token else []
        lines += [] if length is None else [f"content-length: {length}"]
        return ("\r\n".join(lines) + f"\r\n{more}\r\n").encode()

    def send(self, requests: Iterable[bytes], answers: bool = True) -> None:
        """One connection after the other, requests on each until the server has enough of it."""
        source = iter(requests)
        while self.open:
            with contextlib.suppress(OSError), self.connect() as connection:
                while self.open:
                    connection.sendall(next(source))
                    if answers and not connection.recv(1 << 16):
                        break

    def crowd(self, count: int, requests: Callable[[int], Iterable[bytes]], answers: bool = True) -> None:
        """`count` connections at once."""
        threads = [threading.Thread(target=self.send, args=(requests(at), answers)) for at in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def attack(function: Attack) -> Attack:
    ATTACKS[function.__name__] = function
    return function


def _bodies(target: Target, *texts: bytes) -> Iterable[bytes]:
    return itertools.cycle([target.head("POST", "/api/entries", len(text)) + text for text in texts])


@attack
def nobody(target: Target) -> None:
    """What the board needs when it is left alone."""


@attack
def endless_strings(target: Target) -> None:
    size = 11 << 20
    texts = [b'{"recipe": "' + unit * (size // len(unit)) for unit in (b"a", b'\\"', b'"', b'",', b"\\u0041")]
    target.send(_bodies(target, *texts))


@attack
def brackets_and_digits(target: Target) -> None:
    size = 11 << 20
    target.send(_bodies(target, b"[" * size, b"[" + b"1," * (size // 2), b"9" * size, b'{"a":' * (size // 5)))


@attack
def large_uploads(target: Target) -> None:
    """Files of 8 MiB with honest recipes, as fast as they are taken."""

    def texts() -> Iterable[bytes]:
        for at in itertools.count():
            steps = [{"step": "weights", "file": "w"}]
            recipe = {"tilewise": 1, "event": "MLP_SPRINT", "name": f"{time.time()} {at}", "steps": steps}
            content = f"{time.time_ns():032d}".ljust((8 << 20) * 4 // 3 - 4, "A")
            content = content[: len(content) // 4 * 4]
            body = json.dumps({"recipe": recipe, "files": {"w": content}}).encode()
            yield target.head("POST", "/api/entries", len(body)) + body

    target.send(texts())


@attack
def honest_looking_flood(target: Target) -> None:
    """Small valid submissions on 64 connections."""

    def texts(lane: int) -> Iterable[bytes]:
        for at in itertools.count():
            steps = [{"step": "quantize", "samples": 1 + (at * 64 + lane) % 1437}]
            body = json.dumps({"recipe": {"tilewise": 1, "event": "MLP_SPRINT", "steps": steps}}).encode()
            yield target.head("POST", "/api/entries", len(body)) + body

    target.crowd(64, texts)


@attack
def idle_connections(target: Target) -> None:
    sockets = []
    while target.open:
        with contextlib.suppress(OSError):
            sockets.append(target.connect())
            if len(sockets) % 2:
                sockets[-1].sendall(b"GET / HTTP/1.1\r\nhost: x\r\nx-slow: ")
        if len(sockets) > 2000:
            sockets.pop(0).close()


@attack
def half_sent_heads(target: Target) -> None:
    """Two thousand connections that have begun a request and do not end it; one that the server closes is replaced."""
    with selectors.DefaultSelector() as selector:
        while target.open:
            if len(selector.get_map()) < 2000:
                with contextlib.suppress(OSError):
                    connection = target.connect()
                    connection.sendall(b"POST /choose HTTP/1.1\r\nhost: x\r\n")
                    selector.register(connection, selectors.EVENT_READ)
                continue
            for key, _ in selector.select(max(0.0, target.until - time.monotonic())):
                selector.unregister(key.fileobj)
                key.fileobj.close()


@attack
def floods_of_choices(target: Target) -> None:
    """Requests for choices without a token, each for another machine."""
    problem = '{"family":"matmul","m":512,"n":512,"k":512,"dtype":"fp16"}'
    bodies = (
        b'{"device":{"kind":"triton","identity":"gpu %d"},"problem":%s}' % (at, problem.encode()) for at in range(10**9)
    )
    heads = (target.head("POST", "/choose", len(body), has_token=False) + body for body in bodies)
    target.send(heads)


@attack
def connections_that_end_at_once(target: Target) -> None:
    while target.open:
        with contextlib.suppress(OSError):
            target.connect().close()


@attack
def one_byte_at_a_time(target: Target) -> None:
    text = target.head("GET", "/", has_token=False, more="x-a: " + "a" * 12000 + "\r\n")
    connections = [(target.connect(), itertools.cycle(text[:-4])) for _ in range(400)]
    while target.open:
        for connection, source in connections:
            with contextlib.suppress(OSError):
                connection.send(bytes([next(source)]))


@attack
def pages_nobody_asked_for(target: Target) -> None:
    """Views that are not kept yet, on 100 connections without a token."""

    def asks(lane: int) -> Iterable[bytes]:
        for at in itertools.count():
            path = f"/board/MLP_SPRINT?team={lane}&number={at % 400}&sort=team"
            yield target.head("GET", path, has_token=False)

    target.crowd(100, asks)


@attack
def long_lists(target: Target) -> None:
    def asks(lane: int) -> Iterable[bytes]:
        return (target.head("GET", f"/api/entries?limit=500&offset={at * 100 + lane}") for at in itertools.count())

    target.crowd(100, asks)


@attack
def searches(target: Target) -> None:
    def asks(lane: int) -> Iterable[bytes]:
        return (target.head("GET", f"/api/entries?team={lane}x{at}%25_&sort=time") for at in itertools.count())

    target.crowd(50, asks)


@attack
def guessed_tokens(target: Target) -> None:
    def asks(lane: int) -> Iterable[bytes]:
        for at in itertools.count():
            yield target.head("GET", "/api/events", has_token=False, more=f"authorization: Bearer tw_{lane}_{at}\r\n")

    target.crowd(200, asks)


@attack
def health_itself(target: Target) -> None:
    target.crowd(300, lambda _: itertools.repeat(target.head("GET", "/health", has_token=False)))


@attack
def answers_not_read(target: Target) -> None:
    """Many requests on one connection, and nobody takes what comes back."""

    def asks(lane: int) -> Iterable[bytes]:
        return (target.head("GET", f"/api/entries?limit=500&offset={at}") * 20 for at in itertools.count())

    target.crowd(20, asks, answers=False)


@attack
def nonsense(target: Target) -> None:
    target.crowd(50, lambda lane: itertools.repeat(bytes((lane * 7 + at) % 256 for at in range(4096))))


@attack
def sign_ins(target: Target) -> None:
    body = b"token=" + b"x" * 150
    head = target.head("POST", "/teacher/in", len(body), has_token=False)
    head = head.replace(b"application/json", b"application/x-www-form-urlencoded")
    target.crowd(100, lambda _: itertools.repeat(head + body))


# --- heads ---


@attack
def many_short_headers(target: Target) -> None:
    """Heads as large as they may be, made of as many lines as fit."""
    head = target.head("GET", "/api/events", has_token=False, more="a:b\r\n" * 3000)
    target.crowd(50, lambda _: itertools.repeat(head))


@attack
def large_cookies(target: Target) -> None:
    """Thousands of cookies in one head, for a page that looks at them."""
    cookies = "; ".join(f"a{at}=\xe9{at}" for at in range(1200))
    head = target.head(
        "GET", "/teacher", has_token=False, more=f"cookie: {cookies}\r\n".encode("latin-1").decode("latin-1")
    )
    target.crowd(50, lambda _: itertools.repeat(head))


@attack
def thousands_of_parameters(target: Target) -> None:
    paths = ["/api/entries?" + "&".join(f"{name}{at}=%25" for at in range(1500)) for name in ("a", "limit=1&team")]
    target.crowd(50, lambda _: itertools.cycle([target.head("GET", path, has_token=False) for path in paths]))


@attack
def many_ranges(target: Target) -> None:
    ranges = ",".join(f"{at}-{at}" for at in range(0, 6000, 2))[:15000].rpartition(",")[0]
    head = target.head("GET", "/static/style.css", has_token=False, more=f"range: bytes={ranges}\r\n")
    target.crowd(50, lambda _: itertools.repeat(head))


@attack
def one_request_behind_the_other(target: Target) -> None:
    """Requests by the hundred in one piece, their answers taken or not."""
    many = (
        target.head("GET", "/board/MLP_SPRINT", has_token=False) * 200
        + target.head("GET", "/health", has_token=False) * 200
    )
    target.crowd(20, lambda _: itertools.repeat(many))


@attack
def the_old_protocol(target: Target) -> None:
    heads = [b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n", b"GET /health HTTP/1.0\r\n\r\n", b"GET /\r\n\r\n"]
    target.crowd(50, lambda _: itertools.cycle(heads))


@attack
def upgrades(target: Target) -> None:
    more = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: eA==\r\n"
    heads = [target.head("GET", path, has_token=False, more=more) for path in ("/", "/health")]
    heads.append(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    target.crowd(50, lambda _: itertools.cycle(heads))


@attack
def odd_methods_and_paths(target: Target) -> None:
    heads = [target.head(method, "/", has_token=False) for method in ("OPTIONS", "TRACE", "BREW", "HEAD")]
    heads += [target.head("GET", "/" + path, has_token=False) for path in ("%00" * 4000, "..%2f" * 2000, "a/" * 6000)]
    target.crowd(50, lambda _: itertools.cycle(heads))


@attack
def the_document(target: Target) -> None:
    target.crowd(50, lambda _: itertools.repeat(target.head("GET", "/openapi.json", has_token=False)))


# --- bodies ---


@attack
def slow_bodies(target: Target) -> None:
    """A byte now and then of bodies that were announced, with and without a token."""
    connections = []
    for at in range(400):
        with contextlib.suppress(OSError):
            connections.append(target.connect())
            connections[-1].sendall(target.head("POST", "/api/entries", 200_000, has_token=bool(at % 2)))
    while target.open:
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.send(b" ")


@attack
def chunks_without_end(target: Target) -> None:
    head = target.head("POST", "/api/entries", more="transfer-encoding: chunked\r\n")
    chunks = b"1\r\na\r\n" * 8000

    def pieces(_: int) -> Iterable[bytes]:
        return itertools.chain([head], itertools.repeat(chunks))

    target.crowd(30, pieces, answers=False)


@attack
def large_forms(target: Target) -> None:
    """A quarter of a megabyte of fields, of escapes, and of brackets in one field."""
    size = 255 << 10
    texts = [b"a=&" * (size // 3), b"%41" * (size // 3), b"recipe=" + b"[" * (size - 10), b"&" * size]
    head = target.head("POST", "/submit", size, has_token=False)
    head = head.replace(b"application/json", b"application/x-www-form-urlencoded")
    target.crowd(30, lambda _: itertools.cycle([head + text.ljust(size, b"a") for text in texts]))


@attack
def forms_for_the_teacher(target: Target) -> None:
    body = b"action=disqualify&entry=1&reason=" + b"x" * 200_000
    head = target.head("POST", "/teacher/do", len(body), has_token=False, more="cookie: teacher=" + "x" * 9000 + "\r\n")
    target.crowd(50, lambda _: itertools.repeat(head + body))


@attack
def thousands_of_steps(target: Target) -> None:
    """Recipes of all that the JSON check lets through, refused only when they are looked at."""
    tile = {"shape": [1, 1, 1], "layout": "nn", "tile": {"mr": 1, "nr": 1, "mc": 1, "nc": 1, "kc": 1, "x": 1}}
    recipe = {"tilewise": 1, "event": "MLP_SPRINT", "steps": [{"step": "tile", "matmul": [tile] * 1500}]}
    body = json.dumps({"recipe": recipe, "files": {f"f{at}": "AAAA" for at in range(2000)}}).encode()
    target.crowd(30, lambda _: itertools.repeat(target.head("POST", "/api/entries", len(body)) + body))


@attack
def gone_before_the_answer(target: Target) -> None:
    """Expensive questions on connections that are reset at once."""
    linger = (1).to_bytes(4, "little") + bytes(4)
    for at in itertools.count():
        if not target.open:
            return
        with contextlib.suppress(OSError), target.connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connection.sendall(target.head("GET", f"/board/MLP_SPRINT?team={at}&sort=team", has_token=bool(at % 2)))


@attack
def entries_one_by_one(target: Target) -> None:
    def asks(lane: int) -> Iterable[bytes]:
        return (
            target.head("GET", f"/entry/{1 + (at * 50 + lane) % 2000}", has_token=False) for at in itertools.count()
        )

    target.crowd(50, asks)


def run(name: str, port: int, token: str, seconds: float, connected: Any = None) -> None:
    """Attack for some seconds. The event `connected` is set with the first connection, or at the end."""
    ATTACKS[name](Target(port, token, seconds, connected))
    if connected is not None:
        connected.set()
