"""`tilewise compete`, the server: serve a board, and measure the entries that wait on it."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli.compete import ThreadsOption
from tilewise.cli.every import AsJson, answer
from tilewise.web.listening import format_address, freeze_imports, listen, require_uvicorn
from tilewise_arena.cli.options import DEFAULT_BOARD, BoardOption, ImagesOption, KeyOption, open_board


def serve(
    where: BoardOption = DEFAULT_BOARD,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    workers: Annotated[int, typer.Option(min=0, max=16, help="Processes that re-run entries.")] = 1,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Threads of a re-run.")] = 1,
    truth: Annotated[str | None, typer.Option(help="TILE_OLYMPIAD: the hidden collection to score against.")] = None,
    images: ImagesOption = None,
    most_queued: Annotated[int, typer.Option(min=1, help="Maximum number of entries of one team in the queue.")] = 100,
    most_stored: Annotated[int, typer.Option(min=1, help="Maximum MiB of files stored for one team.")] = 256,
    rate: Annotated[
        float, typer.Option(min=0, help="Maximum requests per second from one client, on average; 0: no limit.")
    ] = 40.0,
    access_log: Annotated[Path | None, typer.Option(help="File for the access log (default: the screen).")] = None,
    behind_proxy: Annotated[
        bool, typer.Option("--behind-proxy", help="Trust a local proxy's X-Forwarded-For.")
    ] = False,
    key: KeyOption = None,
) -> None:
    """Serve a board with its pages and API, and re-run entries in worker processes beside it.

    Example: tilewise compete serve --board board.sqlite --port 8000
    """
    require_uvicorn()
    from tilewise.web.connections import GuardedServer, allow_files
    from tilewise_arena.server import create_app
    from tilewise_arena.server.workers import Workers

    _log_accesses(access_log)
    allow_files()
    _check_settings(truth, images)
    listening = listen(host, port)
    open_board(where, key, create=True).close()  # the board is there, and its key fits, before anything is started
    crew = Workers(workers, where, threads, {"truth": truth, "images": images}, key)
    try:
        count_workers = crew.alive if workers else None
        app = create_app(
            where,
            most_queued=most_queued,
            most_stored=most_stored << 20,
            key=key,
            rate=rate,
            has_truth=truth is not None,
            workers=count_workers,
        )
        freeze_imports()
        server = GuardedServer(app, listening, behind_proxy)
        server.stop_on_signals()
        print(f"the board is at http://{format_address(listening)}", flush=True)
        sys.setswitchinterval(1e-3)  # requests are short: a thread that reads the board gives way sooner
        server.run(sockets=[])
    except (KeyboardInterrupt, SystemExit):
        pass
    finally:
        crew.close()
        logging.shutdown()
    os._exit(0)  # whoever still reads a large board in a thread does not hold up the end


def _check_settings(truth: str | None, images: str | None) -> None:
    """Raise an error if the teacher's private collection or images cannot be read."""
    from tilewise.bench.events import TinyMLPerf
    from tilewise.bench.validation import read_images
    from tilewise.costmodel import load_dataset

    if truth is not None:
        load_dataset(truth)
    if images is not None:
        read_images(Path(images), TinyMLPerf.MLP_SPRINT)


def _log_accesses(path: Path | None) -> None:
    """Log one line per request: time, address, token, route, status, bytes and duration."""
    from logging.handlers import RotatingFileHandler

    handler = logging.StreamHandler() if path is None else RotatingFileHandler(path, maxBytes=16 << 20, backupCount=8)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger("tilewise.access")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def work(
    where: BoardOption = DEFAULT_BOARD,
    threads: ThreadsOption = 1,
    truth: Annotated[str | None, typer.Option(help="TILE_OLYMPIAD: the hidden collection to score against.")] = None,
    images: ImagesOption = None,
    key: KeyOption = None,
) -> None:
    """Re-run every waiting entry on this machine, then exit.

    Example: tilewise compete work --board postgresql://teacher@db/board
    """
    from tilewise.bench import Settings
    from tilewise_arena.worker import work as run

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run(where, Settings(truth=truth, images=images), threads, once=True, key=key)
    print("no entry waits any more")


def rerun(
    number: Annotated[int, typer.Argument(help="An entry of the open division.")],
    where: BoardOption = DEFAULT_BOARD,
    threads: ThreadsOption = 1,
    key: KeyOption = None,
    as_json: AsJson = False,
) -> None:
    """Run an open entry's plugin here, isolated and with limits, and put the result on the board.

    Example: tilewise compete rerun 17 --board board.sqlite
    """
    from tilewise_arena.worker import rerun_plugin

    with open_board(where, key) as board:
        entry = rerun_plugin(board, number, threads)
    facts = {name: entry[name] for name in ("id", "team", "event", "status", "score", "reason")}
    answer(as_json, facts, f"entry {number}: {entry['status']} {entry['reason'] or entry['score']}")
