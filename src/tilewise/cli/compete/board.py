"""`tilewise compete`, the leaderboard: submit to it and look at it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tilewise._addons import require
from tilewise.cli.compete.options import LOCAL_BOARD, ThreadsOption
from tilewise.cli.every import AsJson, answer, one_of
from tilewise.cli.tables import show, table
from tilewise.errors import ConfigurationError


def submit(
    event: Annotated[str, typer.Option("--event", help="The event.")] = "MLP_SPRINT",
    entry: Annotated[str, typer.Option("--entry", help="A recipe file, or `reference`.")] = "reference",
    to: Annotated[str, typer.Option("--board", help="A leaderboard file, or a server's address.")] = LOCAL_BOARD,
    team: Annotated[str, typer.Option(help="Your team, on a local board.")] = "me",
    token: Annotated[str | None, typer.Option(help="Your team's token, for a server; or TILEWISE_TOKEN.")] = None,
    plugin: Annotated[Path | None, typer.Option(help="Open division: the plugin's file (needs a server).")] = None,
    threads: ThreadsOption = 1,
    as_json: AsJson = False,
) -> None:
    """Put an entry on a board: measured here for a board file, measured by its workers for a server.

    Example: tilewise compete submit --event CNN_MARATHON --entry mine.json --board https://board.example --token tw_…
    """
    from tilewise.bench import CompetitionSubmission
    from tilewise.cli.compete.app import load_entry

    submission = CompetitionSubmission(event, load_entry(event, entry), team, threads=threads)
    if plugin is not None:
        from tilewise.bench.client import submit as send

        if not to.startswith(("http://", "https://")):
            raise ConfigurationError("a plugin goes to a server's board; score it here with `compete run --plugin`")
        receipt = send(to, submission.recipe, token, plugin)
    else:
        receipt = submission.submit_to_leaderboard(to, token)
    score = f", score {receipt['score']:.3f}" if "score" in receipt else ""
    summary = f"entry {receipt['entry']}: {receipt['status']}{score}"
    answer(as_json, receipt, summary, f"receipt {receipt['hash']}")


def board(
    where: Annotated[str, typer.Option("--board", help="A file, a database URL, or a server's address.")] = LOCAL_BOARD,
    event: Annotated[str | None, typer.Option(help="One event only.")] = None,
    division: Annotated[str, one_of("closed", "open")] = "closed",
    limit: Annotated[int, typer.Option(min=1, max=500, help="Rows shown.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show a board, best entries first; a server's needs no token.

    Example: tilewise compete board --board https://board.example --event MLP_SPRINT
    """
    from tilewise.bench.events import TinyMLPerf
    from tilewise.bench.leaderboard import SUFFIX, LocalLeaderboard

    if division not in ("closed", "open"):
        raise ConfigurationError(f"a division is closed or open, not {division[:40]!r}")
    names = [TinyMLPerf.event(event).name] if event else [e.name for e in TinyMLPerf.events()]
    if where.startswith(("http://", "https://")):
        from tilewise.bench.client import standings

        rows = {name: standings(where, name, division, limit) for name in names}
    elif Path(where).suffix == SUFFIX:
        rows = {name: LocalLeaderboard(where).standings(name, limit) if division == "closed" else [] for name in names}
    else:
        boards = require("tilewise_arena.board", "a board in a database")
        with boards.open_board(where, create=False) as database:
            rows = {name: database.standings(name, division, limit=limit) for name in names}
    if as_json:
        print(json.dumps(rows))
        return
    if not any(rows.values()):
        print(f"{where} has no entries in the {division} division yet")
    for name, entries in rows.items():
        if entries or event:
            _print_board(name, division, entries)


def _print_board(name: str, division: str, rows: list[dict[str, Any]]) -> None:
    """Print the entries of one event as a table."""
    cells = []
    for row in rows:
        gains = ["–" if row[n] is None else f"{row[n]:.2f}×" for n in ("speedup", "memory_gain", "size_gain")]
        score = "–" if row["score"] is None else f"{row['score']:.3f}"
        status = row["status"] + (" (record)" if row["record"] else "")
        entry = f"{row['id']} {row['name']}".strip()
        cells.append((row["rank"] or "", row["team"], entry, score, *gains, status))
    headings = ("", "team", "entry", "score", "speed", "memory", "size", "status")
    show(table(headings, cells, f"{name}, {division} division", left=("team", "entry", "status")))


def register(compete: typer.Typer) -> None:
    """Attach these commands."""
    for command in (submit, board):
        compete.command()(command)
