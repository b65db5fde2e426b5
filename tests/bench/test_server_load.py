"""200 submitters, 5,000 submissions, the server killed twice: what was acknowledged is there, once, chain whole."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from tests.bench.postgres import find_binaries, running_postgres
from tests.bench.site import Served
from tests.bench.test_board import recipe
from tilewise.bench.board import open_board, verify
from tilewise.bench.tokens import create_token

SUBMITTERS, EACH, KILLS = 200, 25, (1500, 3500)
pytestmark = pytest.mark.slow


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield str(tmp_path / "board.sqlite")
    elif find_binaries() is None:
        pytest.skip("PostgreSQL is not installed; `make test-server` installs it")
    else:
        with running_postgres() as url:
            yield url


class Submitter(threading.Thread):
    """A team that sends its entries one after the other, again and again until each is acknowledged."""

    def __init__(self, port: int, team: str, token: str, counter: Counter[str]) -> None:
        super().__init__(daemon=True)
        self.port, self.team, self.token, self.counter = port, team, token, counter
        self.acknowledged: dict[str, int] = {}

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        for at in range(EACH):
            name = f"{self.team} {at}"
            body = json.dumps({"recipe": recipe(name, at + 1)})
            while name not in self.acknowledged:
                try:
                    connection.request("POST", "/api/entries", body, self._headers())
                    answer = connection.getresponse()
                    self._take(name, answer.status, json.loads(answer.read()))
                except (OSError, http.client.HTTPException, ValueError):
                    connection.close()
                    self.counter["broken"] += 1
                    time.sleep(0.1)

    def _headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"}

    def _take(self, name: str, status: int, answer: dict[str, object]) -> None:
        self.counter[str(status)] += 1
        if status == 201 or (status == 409 and answer.get("code") == "replayed"):
            self.acknowledged[name] = int(str(answer["entry"]))
        else:
            time.sleep(0.2)


def test_every_acknowledged_entry_is_there_once_after_two_kills(where: str, tmp_path: Path) -> None:
    key = tmp_path / "board.key"
    with open_board(where, key=key) as board:
        tokens = {f"team {i}": create_token(board, f"team {i}") for i in range(SUBMITTERS)}
    served, counter = Served(where, key), Counter[str]()
    submitters = [Submitter(served.port, team, token, counter) for team, token in tokens.items()]
    started = time.perf_counter()
    try:
        for submitter in submitters:
            submitter.start()
        for count in KILLS:
            while sum(len(s.acknowledged) for s in submitters) < count:
                time.sleep(0.02)
            served.kill()
            served.start()
        for submitter in submitters:
            submitter.join(400)
    finally:
        served.stop()
    seconds = time.perf_counter() - started
    acknowledged = {name: entry for s in submitters for name, entry in s.acknowledged.items()}
    assert len(acknowledged) == SUBMITTERS * EACH, counter
    with open_board(where, key=key, create=False) as board:
        verdict = verify(board)
        assert verdict.good, verdict.faults
        shown = {row["name"]: row["id"] for row in board.entries(limit=10**6)}
        assert len(board.entries(limit=10**6)) == SUBMITTERS * EACH
    assert shown == acknowledged
    print(f"\n{len(shown)} entries in {seconds:.0f} s with two kills, answers {dict(counter)}")
