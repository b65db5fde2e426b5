"""The worker: takes entries from the board's queue, measures each in a fresh process, and stores the results.

It runs in a separate process and never inside the web server. A running job has a heartbeat, a counter. If another
worker sees no change of it for the length of a lease, by its own monotonic clock, the job is free again; wall clocks of
machines play no part. If an entry scores above the record, both are measured interleaved, and the record changes hands
only if the new entry wins at p < 0.01.
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

from tilewise._system import die_with_parent
from tilewise.bench.measure import Settings
from tilewise.bench.recipe import Recipe
from tilewise.bench.scoring import check_consistent
from tilewise.bench.submission import exchange, isolated_request, run_isolated
from tilewise.errors import ConfigurationError, Rejected, TilewiseError, TooNoisy, UnavailableError
from tilewise_arena.board import Board, open_board

log = logging.getLogger("tilewise.worker")
BEAT_SECONDS = 5.0
LEASE_SECONDS = 60.0  # without a beat
_ATTEMPTS = 5
_PAUSE = 0.5
_FOLDERS = re.compile(r"(?<![\w.~-])/(?:[^\s/:'\"]+/)+")


class Watch:
    """Detects running jobs whose heartbeat has stopped, by remembering when each beat was first seen."""

    def __init__(self, lease: float = LEASE_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease, self._clock = lease, clock
        self._beats: dict[int, tuple[int, float]] = {}

    def abandoned(self, running: Mapping[int, int]) -> dict[int, int]:
        """Return the running entries, with heartbeats, whose heartbeat has not changed for a lease's time."""
        now = self._clock()
        unchanged = {e: self._beats[e] for e, beat in running.items() if e in self._beats and self._beats[e][0] == beat}
        self._beats = {entry: unchanged.get(entry, (beat, now)) for entry, beat in running.items()}
        return {entry: beat for entry, (beat, since) in self._beats.items() if now - since >= self._lease}


@contextmanager
def beating(board: Board, worker: str, every: float = BEAT_SECONDS) -> Iterator[None]:
    """Increment the heartbeat of the worker's job every few seconds inside the block."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(every):
            with contextlib.suppress(TilewiseError), board.write() as transaction:
                transaction.beat(worker)

    thread = threading.Thread(target=run, name="beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(10)


def run_one(
    board: Board, settings: Settings, threads: int = 1, worker: str = "", watch: Watch | None = None
) -> int | None:
    """Measure the next entry of the queue and store its result; return its id, or None if there is none."""
    worker = worker or new_name()
    lost_workers = watch.abandoned(board.running()) if watch is not None else {}
    with board.write() as transaction:
        number = transaction.claim_job(worker, _ATTEMPTS, lost_workers)
    if number is None:
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="tilewise-entry-") as folder, beating(board, worker):
            outcome, facts, reason = _measure_entry(board, number, Path(folder), settings, threads)
    except (SystemExit, KeyboardInterrupt):  # the entry goes back to the queue, and this attempt does not count
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
    """Return a unique name for a worker."""
    return f"{os.getpid()}-{secrets.token_hex(8)}"


def _measure_entry(
    board: Board, number: int, folder: Path, settings: Settings, threads: int
) -> tuple[str, dict[str, Any] | None, str]:
    """Score an entry in a separate process; return (outcome, figures or None, reason if there are none)."""

    def measure() -> dict[str, Any]:
        facts = run_isolated("score", board.recipe(number, folder), settings, threads)
        check_consistent(facts)
        return facts

    try:
        return _measurement_outcome(measure)
    except UnavailableError as error:  # the last words of a process are for the teacher only
        log.warning("entry %s: %s", number, error)
        return "rejected", None, "the process that measured this entry ended before it had a result"
    except TilewiseError as error:
        return "rejected", None, for_everybody(error)


def _measurement_outcome(measure: Callable[[], dict[str, Any]]) -> tuple[str, dict[str, Any] | None, str]:
    """Run a measurement and convert exceptions; return (outcome, figures or None, reason if there are none)."""
    try:
        return "scored", measure(), ""
    except TooNoisy as error:
        return "noisy", None, for_everybody(error)
    except Rejected as error:
        return "rejected", None, f"{error.code}: {for_everybody(error)}"


def for_everybody(error: TilewiseError) -> str:
    """Return an error's sentence with this machine's folders removed."""
    return _FOLDERS.sub("", str(error))


def consider_record(board: Board, number: int, settings: Settings, threads: int = 1) -> bool:
    """Give an entry its event's record if there is none, or it is faster than the holder at p < 0.01."""
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
    outcome = _duel(board, number, holder, settings, threads)
    if outcome["beaten"]:
        with board.write() as transaction:
            transaction.record(number, outcome["p_value"], outcome["factor"], holder)
    return bool(outcome["beaten"])


def _duel(board: Board, number: int, holder: int, settings: Settings, threads: int) -> dict[str, Any]:
    """Time an entry and the record's holder interleaved; return the figures, and whether the holder is beaten."""
    entry = board.entry(number)
    assert entry is not None
    if entry["event"] == "TILE_OLYMPIAD":  # its score does not vary between runs
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
    """Run the plugin of an open-division entry on this machine and store the result."""
    from tilewise_arena.sandbox import score_plugin

    entry = board.entry(number)
    if entry is None or entry["division"] != "open":
        raise ConfigurationError(f"there is no entry {number} of the open division on this board")
    if entry["status"] == "disqualified":
        raise ConfigurationError(f"entry {number} is disqualified: lift the disqualification first")
    with tempfile.TemporaryDirectory(prefix="tilewise-plugin-") as folder:
        path = Path(folder) / "plugin.py"
        path.write_bytes(board.files(number)["plugin.py"])
        outcome, facts, reason = _measurement_outcome(
            lambda: score_plugin(path, entry["event"], settings, threads).as_dict()
        )
    with board.write() as transaction:
        transaction.result(number, outcome, facts, reason)
    updated_entry = board.entry(number)
    assert updated_entry is not None
    return updated_entry


def work(
    where: str,
    settings: Settings,
    threads: int = 1,
    once: bool = False,
    key: Path | None = None,
    name: str = "",
) -> None:
    """Measure queued entries until the parent process ends or, with `once`, until the queue is empty."""
    parent, worker, watch = os.getppid(), name or new_name(), Watch()
    with open_board(where, create=False, key=key) as board:
        while os.getppid() == parent:
            number = None
            try:
                number = run_one(board, settings, threads, worker, watch)
                if number is None and once and not board.running():
                    return
            except TilewiseError as error:
                log.warning("%s", error)
                if once:
                    raise
            if number is None:
                time.sleep(_PAUSE)


def _end(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not interrupt the release of the job
    sys.exit(0)


def main() -> None:
    """Measure queued entries until SIGTERM; arguments: board, threads, settings as JSON, key file, name."""
    die_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGTERM, _end)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    where, threads, settings, key, name = sys.argv[1:6]
    work(where, replace(Settings(), **json.loads(settings)), int(threads), key=Path(key) if key else None, name=name)


if __name__ == "__main__":
    main()
