"""What comes over the network, damaged: requests to the two servers, and the answers that clients get.

The content lies in a file like any other target's and is sent as a body. A refusal is an answer from 400 to 499.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.damage import in_json, in_lines
from fuzz.targets import Target, target
from tilewise._files import read_input
from tilewise.errors import ConfigurationError

_MOST = 1 << 20


def _posted(place: Path, app: Any, path: str, token: str) -> Target:
    """Send the file to a server that lives as long as the target."""
    from starlette.testclient import TestClient

    client = TestClient(app, headers={"Content-Type": "application/json", "Authorization": f"Bearer {token}"})
    client.__enter__()

    def use(place: Path) -> None:
        answer = client.post(path, content=read_input(place, _MOST))
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            raise ConfigurationError(str(answer.json()["detail"]))

    return Target(place, use, (in_json,), lambda: client.__exit__(None, None, None))


def _answered(ask: Callable[[str], object]) -> Callable[[Path], None]:
    """Let a client ask a server that answers with the file."""

    def use(place: Path) -> None:
        content = read_input(place, _MOST)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.do_GET()

            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        with HTTPServer(("127.0.0.1", 0), Handler) as server:
            server.timeout = 60
            thread = threading.Thread(target=server.handle_request)
            thread.start()
            try:
                ask(f"http://127.0.0.1:{server.server_port}")
            finally:
                thread.join()

    return use


@target
def board_request(folder: Path) -> Target:
    from tests.bench.test_board import recipe
    from tilewise_arena.board import open_board
    from tilewise_arena.board.tokens import create_token
    from tilewise_arena.server import create_app

    with open_board(folder / "b.sqlite") as board:
        token = create_token(board, "owls")
    (folder / "x.json").write_text(json.dumps({"recipe": recipe("mine"), "files": {}}))
    app = create_app(folder / "b.sqlite", rate=1e6, most_queued=10**6)
    return _posted(folder / "x.json", app, "/api/entries", token)


def _service(folder: Path, path: str, content: Mapping[str, Any]) -> Target:
    from tests.fleet.test_service import PART
    from tilewise.store.store import Store
    from tilewise_fleet.service.app import create_app
    from tilewise_fleet.service.tokens import create_token

    with Store(folder / "s.sqlite") as store:
        token = create_token(store, PART)
    (folder / "x.json").write_text(json.dumps(content))
    return _posted(folder / "x.json", create_app(str(folder / "s.sqlite"), rate=0), path, token)


@target
def service_question(folder: Path) -> Target:
    from tests.fleet.test_service import GPU, spec, tiles

    return _service(folder, "/choose", {"device": GPU, "problem": spec(), "configs": tiles(4)})


@target
def service_measurements(folder: Path) -> Target:
    from tests.fleet.test_service import GPU, batch

    return _service(folder, "/measurements", {"device": GPU, "batches": [batch(count=4)]})


@target
def service_answer(folder: Path) -> Target:
    from tests.fleet.test_service import spec, tiles
    from tilewise.store.problem import Config, Problem
    from tilewise.store.service import ServiceClient
    from tilewise.store.store import Machine

    configs = [Config(tile) for tile in tiles(4)]
    choice = {"config": dict(configs[1]), "source": "measured", "sure": 0.9, "measurements": 3, "runtime_ns": 1e5}
    (folder / "x.json").write_text(json.dumps({"choices": [choice]}))

    def ask(url: str) -> None:
        answer = ServiceClient(url, Machine("triton", "NVIDIA H200", {}), token="x").choose(Problem(spec()), configs)
        assert answer is None or answer.config in configs

    return Target(folder / "x.json", _answered(ask), (in_json,))


@target
def answering_process(folder: Path) -> Target:
    """What a student's process writes in place of answers."""
    from tilewise.learn.remote import Codec, ConnectionLost, MessageChannel

    values = [
        Codec().encode(value) for value in (3, [1, 2.5, "x", None], np.ones((2, 3), np.float32), {"a": (1, slice(2))})
    ]
    (folder / "x.jsonl").write_text("".join(json.dumps({"value": value}) + "\n" for value in values))
    rejections = (
        ConnectionLost,
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
    )  # what `checking` takes for a wrong answer

    def use(path: Path) -> None:
        reading, writing = os.pipe()
        try:
            os.write(writing, read_input(path, 60_000))
            os.close(writing)
            line = MessageChannel(reading, reading, time.monotonic() + 60)
            with contextlib.suppress(*rejections):
                while True:
                    Codec().decode(line.receive().get("value"))
        finally:
            os.close(reading)

    return Target(folder / "x.jsonl", use, (in_lines,))


@target
def board_answer(folder: Path) -> Target:
    from tilewise.bench.client import standings

    row = {"id": 1, "rank": 1, "team": "owls", "name": "mine", "status": "scored", "submitted_at": "2026-01-01",
           "record": True, "score": 2.0, "speedup": 2.0, "memory_gain": 1.0, "size_gain": 1.0}  # fmt: skip
    (folder / "x.json").write_text(json.dumps({"entries": [row, row | {"id": 2, "rank": None, "score": None}]}))
    ask = _answered(lambda url: standings(url, "MLP_SPRINT", "closed", 10))
    return Target(folder / "x.json", ask, (in_json,))
