"""The worker: takes entries from the board's queue, measures each in a fresh process, and writes down what it found.

It is a process of its own, beside the web server and never inside it. One that dies leaves its job to the next: a job
is only lent, for as long as a measurement may take. When an entry scores above the record, both are measured in turns,
and the record changes hands only if the new one wins at p < 0.01.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewise.bench.board import Board, open_board
from tilewise.bench.errors import Rejected, TooNoisy
from tilewise.bench.measure import Settings
from tilewise.bench.recipe import Recipe
from tilewise.bench.submission import exchange, isolated_request, run_isolated
from tilewise.errors import ConfigurationError, TilewiseError

log = logging.getLogger("tilewise.worker")
LEASE_SECONDS = 1800.0
_ATTEMPTS = 3
_PAUSE = 0.5


def run_one(board: Board, settings: Settings, threads: int = 1) -> int | None:
    """Measure the next entry of the queue; gives its number, or None where nothing waits."""
    with board.write() as transaction:
        number = transaction.claim_job(f"{os.getpid()}", LEASE_SECONDS, _ATTEMPTS)
    if number is None:
        return None
    with tempfile.TemporaryDirectory(prefix="tilewise-entry-") as folder:
        outcome, facts, reason = _measured(board, number, Path(folder), settings, threads)
    with board.write() as transaction:
        transaction.result(number, outcome, facts, reason)
    log.info("entry %s: %s %s", number, outcome, reason or f"{facts['score']:.3f}" if facts else reason)
    if facts is not None:
        consider_record(board, number, settings, threads)
    return number


def _measured(
    board: Board, number: int, folder: Path, settings: Settings, threads: int
) -> tuple[str, dict[str, Any] | None, str]:
    try:
        return "scored", run_isolated("score", board.recipe(number, folder), settings, threads), ""
    except TooNoisy as error:
        return "noisy", None, str(error)
    except Rejected as error:
        return "rejected", None, f"{error.code}: {error}"
    except TilewiseError as error:
        return "rejected", None, str(error)


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
            return exchange("tilewise.bench.isolated", _duel_request(one, other, settings, threads), threads)
        except TilewiseError as error:
            log.warning("entry %s against record %s: %s", number, holder, error)
            return {"beaten": False}


def _duel_request(one: Recipe, other: Recipe, settings: Settings, threads: int) -> dict[str, Any]:
    request = isolated_request("duel", one, settings, threads)
    return request | {"record": isolated_request("duel", other, settings, threads)}


def rerun_plugin(board: Board, number: int, threads: int = 1, settings: Settings | None = None) -> dict[str, Any]:
    """Run the plugin of an open entry on this machine, as its owner, and write down what was found."""
    from tilewise.bench.plugins import score_plugin

    entry = board.entry(number)
    if entry is None or entry["division"] != "open":
        raise ConfigurationError(f"there is no entry {number} of the open division on this board")
    outcome, facts, reason = "scored", None, ""
    with tempfile.TemporaryDirectory(prefix="tilewise-plugin-") as folder:
        path = Path(folder) / "plugin.py"
        path.write_bytes(board.files(number)["plugin.py"])
        try:
            facts = score_plugin(path, entry["event"], settings, threads).as_dict()
        except TooNoisy as error:
            outcome, reason = "noisy", str(error)
        except Rejected as error:
            outcome, reason = "rejected", f"{error.code}: {error}"
    with board.write() as transaction:
        transaction.result(number, outcome, facts, reason)
    found = board.entry(number)
    assert found is not None
    return found


def work(where: str, settings: Settings, threads: int = 1, once: bool = False, key: Path | None = None) -> None:
    """Run until the process that started this one is gone (or, `once`, until the queue is empty)."""
    parent = os.getppid()
    with open_board(where, create=False, key=key) as board:
        while os.getppid() == parent:
            try:
                found = run_one(board, settings, threads)
            except TilewiseError as error:
                log.warning("%s", error)
                found = None
            if found is None and once:
                return
            if found is None:
                time.sleep(_PAUSE)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    where, threads, truth, key = sys.argv[1:5]
    work(where, replace(Settings(), truth=truth or None), int(threads), key=Path(key) if key else None)


if __name__ == "__main__":
    main()
