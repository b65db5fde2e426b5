"""Single hostile clients, each a function that does its worst to a served board until told to stop.

They run in processes of their own; see `bars`, which looks how the board does meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable

Attack = Callable[["Target"], None]
ATTACKS: dict[str, Attack] = {}


class Target:
    """The board's port, a student's token, and when to stop."""

    def __init__(self, port: int, token: str, seconds: float) -> None:
        self.port, self.token, self.until = port, token, time.monotonic() + seconds

    @property
    def open(self) -> bool:
        return time.monotonic() < self.until

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=5)

    def head(self, method: str, path: str, length: int | None = None, known: bool = True, more: str = "") -> bytes:
        lines = [f"{method} {path} HTTP/1.1", "host: x", "content-type: application/json"]
        lines += [f"authorization: Bearer {self.token}"] if known else []
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
    held = []
    while target.open:
        with contextlib.suppress(OSError):
            held.append(target.connect())
            if len(held) % 2:
                held[-1].sendall(b"GET / HTTP/1.1\r\nhost: x\r\nx-slow: ")
        if len(held) > 2000:
            held.pop(0).close()


@attack
def connections_that_end_at_once(target: Target) -> None:
    while target.open:
        with contextlib.suppress(OSError):
            target.connect().close()


@attack
def one_byte_at_a_time(target: Target) -> None:
    text = target.head("GET", "/", known=False, more="x-a: " + "a" * 12000 + "\r\n")
    held = [(target.connect(), itertools.cycle(text[:-4])) for _ in range(400)]
    while target.open:
        for connection, source in held:
            with contextlib.suppress(OSError):
                connection.send(bytes([next(source)]))


@attack
def pages_nobody_asked_for(target: Target) -> None:
    """Views that are not kept yet, on 100 connections without a token."""

    def asks(lane: int) -> Iterable[bytes]:
        for at in itertools.count():
            path = f"/board/MLP_SPRINT?team={lane}&number={at % 400}&sort=team"
            yield target.head("GET", path, known=False)

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
            yield target.head("GET", "/api/events", known=False, more=f"authorization: Bearer tw_{lane}_{at}\r\n")

    target.crowd(200, asks)


@attack
def health_itself(target: Target) -> None:
    target.crowd(300, lambda _: itertools.repeat(target.head("GET", "/health", known=False)))


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
    head = target.head("POST", "/teacher/in", len(body), known=False)
    head = head.replace(b"application/json", b"application/x-www-form-urlencoded")
    target.crowd(100, lambda _: itertools.repeat(head + body))


def run(name: str, port: int, token: str, seconds: float) -> None:
    ATTACKS[name](Target(port, token, seconds))
