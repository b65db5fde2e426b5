"""200 submitters, 5,000 submissions, 8 kills of server, workers and database: nothing is lost, doubled or left waiting.

What a worker measures is made up here (see quick_site), so that every entry comes to its end.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from tests.bench.postgres import Cluster, find_binaries, running_cluster
from tests.bench.site import Served
from tests.bench.test_board import recipe
from tests.waiting import PATIENCE, until
from tilewise_arena.board import open_board, verify
from tilewise_arena.board.tokens import create_token

SUBMITTERS, EACH, WORKERS = 200, 25, 2
KILLS = ("server", "worker", "database", "worker", "server", "database", "worker", "server")
LONGEST_WAIT = 300.0
pytestmark = pytest.mark.slow


@dataclass
class Store:
    """Where a board is, and its database; a file has no process to crash: the server goes instead."""

    where: str
    cluster: Cluster | None


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "sqlite":
        yield Store(str(tmp_path / "board.sqlite"), None)
    elif find_binaries() is None:
        pytest.skip("PostgreSQL is not installed; `make test-server` installs it")
    else:
        with running_cluster() as cluster:
            yield Store(cluster.url, cluster)


class Submitter(threading.Thread):
    """A team that sends its entries one after the other, again and again until each is acknowledged."""

    def __init__(self, port: int, team: str, token: str, counter: Counter[str]) -> None:
        super().__init__(daemon=True)
        self.port, self.team, self.token, self.counter = port, team, token, counter
        self.acknowledged: dict[str, int] = {}

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
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


def strike(what: str, served: Served, store: Store) -> str:
    """One kill; gives what was killed in the end."""
    if what == "worker" and (worker_pids := served.workers()):
        os.kill(worker_pids[0], signal.SIGKILL)
        return "worker"
    if what == "database" and store.cluster is not None:
        store.cluster.crash()
        return "database"
    served.kill()
    served.start()
    return "server"


def test_after_eight_kills_nothing_is_lost_doubled_or_left_waiting(store: Store, tmp_path: Path) -> None:
    key, total = tmp_path / "board.key", SUBMITTERS * EACH
    with open_board(store.where, key=key) as board:
        tokens = {f"team {i}": create_token(board, f"team {i}") for i in range(SUBMITTERS)}
    served = Served(store.where, key, WORKERS, module="tests.bench.quick_site")
    counter, struck = Counter[str](), Counter[str]()
    submitters = [Submitter(served.port, team, token, counter) for team, token in tokens.items()]
    started = time.perf_counter()
    try:
        for submitter in submitters:
            submitter.start()
        for at, what in enumerate(KILLS, 1):
            enough = at * total // (len(KILLS) + 1)
            until(lambda enough=enough: sum(len(s.acknowledged) for s in submitters) >= enough, seconds=LONGEST_WAIT)
            struck[strike(what, served, store)] += 1
        for submitter in submitters:
            submitter.join(LONGEST_WAIT)
        seconds = time.perf_counter() - started
        with open_board(store.where, key=key, create=False) as board:
            until(lambda: board.waiting() == 0, seconds=LONGEST_WAIT)
    finally:
        served.stop()
    acknowledged = {name: entry for s in submitters for name, entry in s.acknowledged.items()}
    assert len(acknowledged) == total, counter
    with open_board(store.where, key=key, create=False) as board:
        verdict = verify(board)
        assert verdict.good, verdict.faults
        rows = board.entries(limit=10**6)
        assert Counter(row["status"] for row in rows) == {"scored": total}
        assert {row["name"]: row["id"] for row in rows} == acknowledged and len(rows) == total
        assert sum(link.kind == "result" for link in board.links()) == total
    print(
        f"\n{total} entries in {seconds:.0f} s, all measured after {time.perf_counter() - started:.0f} s; killed "
        f"{dict(struck)}; answers {dict(counter)}"
    )
