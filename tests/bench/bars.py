"""Figures of a served board that tests do not assert on: `python -m tests.bench.bars`, or one of its parts.

`pages`: a board of 20,000 entries, every page made anew, and submitting on it beside an empty board. `health`: how soon
/health answers while one hostile client does its worst; `service`: the same for `tilewise fleet serve`. `end`: seconds
from SIGTERM to the end while a class submits.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import multiprocessing
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bench import hostile
from tests.bench.site import Served
from tests.bench.test_board import made_up_score, recipe
from tests.waiting import PATIENCE
from tilewise_arena.board import Board, open_board
from tilewise_arena.board.tokens import create_token

ENTRIES, TEAMS, ROUNDS = 20_000, 200, 40
PAGES = ("/", "/board/MLP_SPRINT", "/board/MLP_SPRINT?number=200", "/board/MLP_SPRINT?number=399&sort=team")
PAGES += ("/board/MLP_SPRINT?sort=time", "/board/MLP_SPRINT?team=17", "/api/entries?limit=100")
PAGES += ("/entry/10001", "/submit", "/teacher", "/teacher/grades.csv", "/api/standings?event=MLP_SPRINT&limit=500")
PAGES += ("/api/entries?limit=500&offset=19000", "/api/entries?team=eam%201&sort=team", "/api/records?event=MLP_SPRINT")


def prepared(path: Path, count: int, *teams: str) -> tuple[Path, list[str]]:
    """The key of a board of so many entries, made where there is none, and a new token for each of the teams."""
    key = path.with_suffix(".key")
    with open_board(path, key=key) as board:
        if board.count() < count:
            fill(board, count)
        return key, [create_token(board, team) for team in teams]


def fill(board: Board, count: int) -> None:
    """Scored entries of many teams, a record now and then."""
    for first in range(0, count, 500):
        with board.write() as transaction:
            for at in range(first, min(first + 500, count)):
                team, samples = f"team {at % TEAMS}", 1 + at // TEAMS
                number = transaction.submit(team, recipe(f"entry {at}", samples))["entry"]
                transaction.result(number, "scored", made_up_score(2.0 + (at * 7919) % 1000 / 500).as_dict())
                if at % 500 == 0:
                    transaction.record(number, 0.001, 1.01, None)


class Client:
    """One kept connection, and how long each answer took."""

    def __init__(self, port: int, token: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    def sign_in(self, token: str) -> None:
        """As a teacher, so that their pages are shown."""
        kind = {"Content-Type": "application/x-www-form-urlencoded"}
        self._connection.request("POST", "/teacher/in", f"token={token}", kind)
        answer = self._connection.getresponse()
        answer.read()
        self._headers["Cookie"] = str(answer.headers["set-cookie"]).partition(";")[0]

    def ask(self, path: str, body: Any = None, good: int = 200) -> float:
        start = time.perf_counter()
        method = "GET" if body is None else "POST"
        self._connection.request(method, path, None if body is None else json.dumps(body), self._headers)
        answer = self._connection.getresponse()
        content = answer.read()
        assert answer.status == good, (answer.status, content[:200])
        return 1e3 * (time.perf_counter() - start)


def submitted(at: int) -> dict[str, Any]:
    return {"recipe": recipe(f"new {at}", 101 + at)}


def pages(folder: Path) -> None:
    """Each page after a submission, so that nothing kept from before can be shown."""
    for count in (0, ENTRIES):
        path = folder / f"{count}.sqlite"
        key, (token,) = prepared(path, count, f"new {time.time_ns()}")
        served = Served(str(path), key, rate=10_000)
        client, numbers = Client(served.port, token), itertools.count()
        with open_board(path, key=key) as board:
            client.sign_in(create_token(board, "Ada", admin=True))
        try:
            latencies: list[float] = []
            latencies_by_page: dict[str, list[float]] = {page: [] for page in PAGES if count}
            for _ in range(ROUNDS):
                for page in latencies_by_page or [""]:
                    latencies.append(client.ask("/api/entries", submitted(next(numbers)), 201))
                    if page:
                        latencies_by_page[page].append(client.ask(page))
        finally:
            served.stop()
        for page, page_latencies in latencies_by_page.items():
            report(f"{count} entries, {page}", page_latencies)
        report(f"{count} entries, submit", latencies)


def report(what: str, milliseconds: list[float]) -> None:
    middle, worst = statistics.median(milliseconds), max(milliseconds)
    late = sum(ms > 100 for ms in milliseconds)
    figures = f"median {middle:6.1f} ms  worst {worst:6.1f} ms  {late} of {len(milliseconds)} over 100 ms"
    print(f"{what:52s} {figures}", flush=True)


@contextmanager
def attacked(name: str, port: int, token: str, seconds: float) -> Iterator[None]:
    """Run an attack in a process of its own; the block starts once the attacker has connected."""
    spawn = multiprocessing.get_context("spawn")
    connected = spawn.Event()
    client = spawn.Process(target=hostile.run, args=(name, port, token, seconds, connected))
    client.start()
    try:
        assert connected.wait(PATIENCE)
        yield
    finally:
        client.terminate()
        client.join()


def health(folder: Path, names: list[str], seconds: float) -> None:
    """Each attack on a server of its own and with a token of its own: nothing that it may ask is used up before."""
    path = folder / "health.sqlite"
    for name in names or list(hostile.ATTACKS):
        key, (token,) = prepared(path, 2000, f"hostile {time.time_ns()}")
        served = Served(str(path), key)
        try:
            with attacked(name, served.port, token, seconds + 1.0):
                report(name, probe(served.port, seconds))
        finally:
            served.stop()


def service(folder: Path, names: list[str], seconds: float) -> None:
    """The same attacks on the tuning service, and the time from SIGTERM to the end under each of them."""
    from tests.fleet.served import ServedStore

    for name in names or list(hostile.ATTACKS):
        served = ServedStore(str(folder / "service.sqlite"))
        with attacked(name, served.port, "tw_unknown", seconds + 3.0):
            report(f"service, {name}", probe(served.port, seconds))
            start = time.perf_counter()
            served.stop()
            print(f"    ended {time.perf_counter() - start:.2f} s after SIGTERM", flush=True)


def probe(port: int, seconds: float) -> list[float]:
    """Milliseconds of /health, each time on a connection of its own, connecting included."""
    latencies, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        start = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.request("GET", "/health")
            assert connection.getresponse().read()
        except (OSError, http.client.HTTPException) as error:
            print(f"    no answer: {error!r}")
            start -= 60.0  # counts as a minute
        connection.close()
        latencies.append(1e3 * (time.perf_counter() - start))
        time.sleep(0.03)
    return latencies


def end(folder: Path) -> None:
    """SIGTERM while 64 connections submit, pages are looked at and a worker measures."""
    path = folder / "health.sqlite"
    key, tokens = prepared(path, 2000, *(f"class {at} {time.time_ns()}" for at in range(64)))
    for turn in range(3):
        served, entered = Served(str(path), key, workers=1), threading.Semaphore(0)
        threads = [
            threading.Thread(target=_submit_until_gone, args=(served.port, t, turn, entered), daemon=True)
            for t in tokens
        ]
        for thread in threads:
            thread.start()
        for _ in threads:  # about one entry of every team
            assert entered.acquire(timeout=PATIENCE)
        start = time.perf_counter()
        served.process.send_signal(signal.SIGTERM)
        code = served.process.wait(60)
        print(f"SIGTERM under load: ended with {code} after {time.perf_counter() - start:.2f} s", flush=True)


def _submit_until_gone(port: int, token: str, turn: int, entered: threading.Semaphore) -> None:
    try:
        client = Client(port, token)
        for at in range(400):
            client.ask("/api/entries", {"recipe": recipe("", 1 + turn * 400 + at)}, 201)
            entered.release()
            client.ask("/board/MLP_SPRINT")
    except (OSError, http.client.HTTPException, AssertionError):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", choices=("prepare", "pages", "health", "service", "end"))
    parser.add_argument("names", nargs="*", help="attacks to try; all of them unless named")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each attack")
    parser.add_argument("--folder", type=Path, help="where the boards are kept for the next time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tilewise-bars-") as temporary:
        folder = options.folder or Path(temporary)
        if options.part == "prepare":
            prepared(folder / f"{ENTRIES}.sqlite", ENTRIES)
            prepared(folder / "health.sqlite", 2000)
        if options.part in (None, "pages"):
            pages(folder)
        if options.part in (None, "health"):
            health(folder, options.names, options.seconds)
        if options.part in (None, "service"):
            service(folder, options.names, options.seconds)
        if options.part in (None, "end"):
            end(folder)


if __name__ == "__main__":
    main()
