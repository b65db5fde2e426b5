"""The worker: takes entries from the board's queue, measures each in a fresh process, and writes down what it found.

It is a process of its own, beside the web server and never inside it. While it lives its job shows a beat; one whose
beat stands still for a while, by the watcher's own steady clock, is free for the next worker, so nothing depends on
what time any machine thinks it is. When an entry scores above the record, both are measured in turns, and the record
changes hands only if the new one wins at p < 0.01.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewise.bench.errors import Rejected, TooNoisy
from tilewise.bench.measure import Settings
from tilewise.bench.processes import die_with_parent
from tilewise.bench.recipe import Recipe
from tilewise.bench.scoring import check_consistent
from tilewise.bench.submission import exchange, isolated_request, run_isolated
from tilewise.errors import ConfigurationError, TilewiseError, UnavailableError
from tilewise_arena.board import Board, open_board

log = logging.getLogger("tilewise.worker")
BEAT_SECONDS = 5.0
LEASE_SECONDS = 60.0  # without a beat
_ATTEMPTS = 5
_PAUSE = 0.5
_FOLDERS = re.compile(r"(?<![\w.~-])/(?:[^\s/:'\"]+/)+")


class Watch:
    """Finds running jobs without a heartbeat: stores the last beat of each, and when it was first observed."""

    def __init__(self, lease: float = LEASE_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease, self._clock = lease, clock
        self._beats: dict[int, tuple[int, float]] = {}

    def abandoned(self, running: Mapping[int, int]) -> dict[int, int]:
        """Return the running entries whose heartbeat has not changed for the length of a lease."""
        now = self._clock()
        unchanged = {e: self._beats[e] for e, beat in running.items() if e in self._beats and self._beats[e][0] == beat}
        self._beats = {entry: unchanged.get(entry, (beat, now)) for entry, beat in running.items()}
        return {entry: beat for entry, (beat, since) in self._beats.items() if now - since >= self._lease}


@contextmanager
def beating(board: Board, worker: str, every: float = BEAT_SECONDS) -> Iterator[None]:
    """Show signs of life while the block runs."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(every):
            with contextlib.suppress(TilewiseError), board.write() as transaction:
                transaction.beat(worker)

    thread = threading.Thread(target=run, name="beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(10)


def run_one(
    board: Board, settings: Settings, threads: int = 1, worker: str = "", watch: Watch | None = None
) -> int | None:
    """Measure the next entry of the queue; gives its number, or None where nothing waits."""
    worker = worker or new_name()
    gone = watch.abandoned(board.running()) if watch is not None else {}
    with board.write() as transaction:
        number = transaction.claim_job(worker, _ATTEMPTS, gone)
    if number is None:
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="tilewise-entry-") as folder, beating(board, worker):
            outcome, facts, reason = _measured(board, number, Path(folder), settings, threads)
    except (SystemExit, KeyboardInterrupt):  # asked to end: the entry goes back as if it had not been tried
        with board.write() as transaction:
            transaction.release(worker, counts=False)
        raise
    with board.write() as transaction:
        if not transaction.holds(worker, number):
            log.info("entry %s: ended or taken over meanwhile", number)
            return number
        transaction.result(number, outcome, facts, reason)
    log.info("entry %s: %s %s", number, outcome, reason or f"{facts['score']:.3f}" if facts else reason)
    if facts is not None:
        consider_record(board, number, settings, threads)
    return number


def new_name() -> str:
    """A worker's name: no two ever have the same."""
    return f"{os.getpid()}-{secrets.token_hex(8)}"


def _measured(
    board: Board, number: int, folder: Path, settings: Settings, threads: int
) -> tuple[str, dict[str, Any] | None, str]:
    def measure() -> dict[str, Any]:
        facts = run_isolated("score", board.recipe(number, folder), settings, threads)
        check_consistent(facts)
        return facts

    try:
        return _outcome(measure)
    except UnavailableError as error:  # what a process says at its end is for the teacher
        log.warning("entry %s: %s", number, error)
        return "rejected", None, "the process that measured this entry ended before it had a result"
    except TilewiseError as error:
        return "rejected", None, for_everybody(error)


def _outcome(measure: Callable[[], dict[str, Any]]) -> tuple[str, dict[str, Any] | None, str]:
    """Run a measurement; returns the outcome, the figures, and the reason if there are none."""
    try:
        return "scored", measure(), ""
    except TooNoisy as error:
        return "noisy", None, for_everybody(error)
    except Rejected as error:
        return "rejected", None, f"{error.code}: {for_everybody(error)}"


def for_everybody(error: TilewiseError) -> str:
    """An error's sentence with files by their own names: the folders of this machine are nobody's business."""
    return _FOLDERS.sub("", str(error))


def consider_record(board: Board, number: int, settings: Settings, threads: int = 1) -> bool:
    """Give the record to entry `number` if it is the first, or beats the holder in a run of both at p < 0.01."""
    entry = board.entry(number)
    if entry is None or entry["score"] is None or entry["status"] != "scored":
        return False
    holder = board.record(entry["event"], entry["division"])
    if holder is None:
        with board.write() as transaction:
            transaction.record(number, 0.0, 1.0, None)
        return True
    record = board.entry(holder)
    if record is None or entry["score"] <= (record["score"] or 0):
        return False
    found = _duel(board, number, holder, settings, threads)
    if found["beaten"]:
        with board.write() as transaction:
            transaction.record(number, found["p_value"], found["factor"], holder)
    return bool(found["beaten"])


def _duel(board: Board, number: int, holder: int, settings: Settings, threads: int) -> dict[str, Any]:
    entry = board.entry(number)
    assert entry is not None
    if entry["event"] == "TILE_OLYMPIAD":  # nothing there varies from run to run
        return {"beaten": True, "p_value": 0.0, "factor": 1.0}
    with tempfile.TemporaryDirectory(prefix="tilewise-duel-") as folder:
        one, other = (board.recipe(n, Path(folder) / str(n)) for n in (number, holder))
        try:
            request = _duel_request(one, other, settings, threads)
            return exchange("tilewise.bench.isolated", request, threads, settings.run_seconds)
        except TilewiseError as error:
            log.warning("entry %s against record %s: %s", number, holder, error)
            return {"beaten": False}


def _duel_request(one: Recipe, other: Recipe, settings: Settings, threads: int) -> dict[str, Any]:
    request = isolated_request("duel", one, settings, threads)
    return request | {"record": isolated_request("duel", other, settings, threads)}


def rerun_plugin(board: Board, number: int, threads: int = 1, settings: Settings | None = None) -> dict[str, Any]:
    """Run the plugin of an open entry on this machine, as its owner, and write down what was found."""
    from tilewise_arena.sandbox import score_plugin

    entry = board.entry(number)
    if entry is None or entry["division"] != "open":
        raise ConfigurationError(f"there is no entry {number} of the open division on this board")
    if entry["status"] == "disqualified":
        raise ConfigurationError(f"entry {number} is disqualified: lift that first")
    with tempfile.TemporaryDirectory(prefix="tilewise-plugin-") as folder:
        path = Path(folder) / "plugin.py"
        path.write_bytes(board.files(number)["plugin.py"])
        outcome, facts, reason = _outcome(lambda: score_plugin(path, entry["event"], settings, threads).as_dict())
    with board.write() as transaction:
        transaction.result(number, outcome, facts, reason)
    found = board.entry(number)
    assert found is not None
    return found


def work(
    where: str,
    settings: Settings,
    threads: int = 1,
    once: bool = False,
    key: Path | None = None,
    name: str = "",
) -> None:
    """Run until the process that started this one is gone (or, `once`, until nothing waits any more)."""
    parent, worker, watch = os.getppid(), name or new_name(), Watch()
    with open_board(where, create=False, key=key) as board:
        while os.getppid() == parent:
            found = None
            try:
                found = run_one(board, settings, threads, worker, watch)
                if found is None and once and not board.running():
                    return
            except TilewiseError as error:
                log.warning("%s", error)
                if once:
                    raise
            if found is None:
                time.sleep(_PAUSE)


def _end(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: what is put back now is not broken off
    sys.exit(0)


def main() -> None:
    die_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGTERM, _end)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    where, threads, given, key, name = sys.argv[1:6]
    work(where, replace(Settings(), **json.loads(given)), int(threads), key=Path(key) if key else None, name=name)


if __name__ == "__main__":
    main()
