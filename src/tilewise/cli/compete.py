"""`tilewise compete`: score and validate entries of the TinyMLPerf competition."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise._addons import require
from tilewise.cli.every import AsJson, answer, one_of, option, output_file
from tilewise.cli.tables import show, table, waiting
from tilewise.errors import ConfigurationError, UnavailableError

if TYPE_CHECKING:
    from tilewise.bench import CompetitionSubmission, Recipe, Settings
    from tilewise.bench.scoring import Score

ThreadsOption = Annotated[int, option("Threads of both sides.", min=1, max=64)]
LOCAL_BOARD = "leaderboard.jsonl"
compete = typer.Typer(no_args_is_help=True, help="TinyMLPerf: score entries, keep a board, serve it to a class.")

_ENTRY = "A recipe file, or `reference` for the entry that ships with tilewise."
EventOption = Annotated[str, option("MLP_SPRINT, CNN_MARATHON, TRANSFORMER_DECATHLON …", "--event")]
EntryOption = Annotated[str, option(_ENTRY, "--entry")]
TruthOption = Annotated[str | None, option("TILE_OLYMPIAD: a collection to score against (its test split).")]


@compete.command()
def run(
    event: EventOption = "MLP_SPRINT",
    entry: EntryOption = "reference",
    team: Annotated[str, option("Name of the team.")] = "me",
    plugin: Annotated[Path | None, option("Open division: a Python file, run in isolation with limits.")] = None,
    threads: ThreadsOption = 1,
    truth: TruthOption = None,
    practice: Annotated[bool, option("Score on a busy machine too, with the interval; never ranked.")] = False,
    out: Annotated[Path | None, output_file(help="Also write the result to this file as JSON.")] = None,
    as_json: AsJson = False,
) -> None:
    """Validate and score an entry on this machine, against plain tilewise in the same run.

    Example: tilewise compete run --event CNN_MARATHON --entry reference
    """
    from tilewise._atomic import write_atomic
    from tilewise.bench import Settings

    settings = Settings(truth=truth, practice=practice)
    compute_score = (
        _plugin(plugin, event, threads, settings)
        if plugin
        else _submission(event, entry, team, threads, settings).compute_score
    )
    with waiting("measuring the entry and plain tilewise, interleaved"):
        score = compute_score()
    facts = score.as_dict()
    if out is not None:
        write_atomic(out, json.dumps(facts, indent=1, default=float) + "\n")
    if as_json:
        print(json.dumps(facts, default=float))
    else:
        print_score(score)


@compete.command()
def validate(
    event: EventOption = "MLP_SPRINT",
    entry: EntryOption = "reference",
    threads: ThreadsOption = 1,
    truth: TruthOption = None,
    as_json: AsJson = False,
) -> None:
    """Check an entry's answers and storage without timing it.

    Example: tilewise compete validate --event MLP_SPRINT --entry my-recipe.json
    """
    from tilewise.bench import Settings

    validation = _submission(event, entry, "me", threads, Settings(truth=truth)).validate()
    answer(as_json, validation.as_dict(), f"{event}: the entry is valid", *(f"  {line}" for line in validation.checks))


def _submission(event: str, entry: str, team: str, threads: int, settings: Settings) -> CompetitionSubmission:
    """Make the submission of an entry (the name or file that the user typed) to an event."""
    from tilewise.bench import CompetitionSubmission

    return CompetitionSubmission(event, load_entry(event, entry), team, threads=threads, settings=settings)


def load_entry(event: str, entry: str) -> Recipe:
    """Load a recipe from a file; the word `reference` is the entry that ships with tilewise."""
    from tilewise.bench import read_recipe, reference_recipe

    return reference_recipe(event) if entry == "reference" else read_recipe(entry)


def _plugin(plugin: Path, event: str, threads: int, settings: Settings) -> Callable[[], Score]:
    """Check a plugin's file and return a function that scores it."""
    from tilewise.bench import TinyMLPerf

    sandbox = require("tilewise_arena.sandbox", "the Open division")
    TinyMLPerf.event(event).check_timed()
    try:
        sandbox.Submitted.read(plugin.resolve())
    except RuntimeError:  # links that lead in a circle
        raise UnavailableError(f"there is no plugin at {plugin}") from None
    return lambda: sandbox.score_plugin(plugin, event, settings, threads)


def print_score(score: Any) -> None:
    """Print the score, the gain after each step of the recipe, and the checks that passed."""
    from rich.console import Console

    console = Console()
    low, high = (f"{bound:.3f}" for bound in score.interval)
    interval = f" (95 % interval {low} to {high})" if low != high else ""
    if not score.steps:
        console.print(f"[bold]{score.event}[/]  score {score.score:.4f}{interval}")
    else:
        rows = []
        for step in score.steps:
            size, file = f"{step['memory_bytes'] / 1024:,.0f} KiB", f"{step['file_bytes'] / 1024:,.1f} KiB"
            gains = f"{step['latency_s'] * 1e3:.3f} ms", f"{step['speedup']:.2f}×", size, file
            rows.append((step["label"], *gains, f"{step['score']:.2f}"))
        headings = ("after", "p50", "speed-up", "memory", "file", "score so far")
        show(table(headings, rows, f"{score.event}: score {score.score:.2f}"), console)
        console.print(
            f"speed-up {score.speedup:.2f}× · memory {score.memory_gain:.2f}× · size {score.size_gain:.2f}× · "
            f"score {score.score:.3f}{interval}"
        )
    for line in score.validation["checks"]:
        console.print(f"  valid: {line}")
    if score.practice:
        console.print("  practice: this score is not ranked")
    for line in score.notes:
        console.print(f"  note: {line}")


# --- leaderboard ---


@compete.command()
def submit(
    event: Annotated[str, option("The event.", "--event")] = "MLP_SPRINT",
    entry: Annotated[str, option("A recipe file, or `reference`.", "--entry")] = "reference",
    to: Annotated[str, option("A leaderboard file, or a server's address.", "--board")] = LOCAL_BOARD,
    team: Annotated[str, option("Your team, on a local board.")] = "me",
    token: Annotated[str | None, option("Your team's token, for a server; or TILEWISE_TOKEN.")] = None,
    plugin: Annotated[Path | None, option("Open division: the plugin's file (needs a server).")] = None,
    threads: ThreadsOption = 1,
    as_json: AsJson = False,
) -> None:
    """Put an entry on a board: measured here for a board file, measured by its workers for a server.

    Example: tilewise compete submit --event CNN_MARATHON --entry mine.json --board https://board.example --token tw_…
    """
    from tilewise.bench import CompetitionSubmission

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


@compete.command()
def board(
    where: Annotated[str, option("A file, a database URL, or a server's address.", "--board")] = LOCAL_BOARD,
    event: Annotated[str | None, option("One event only.")] = None,
    division: Annotated[str, one_of("closed", "open")] = "closed",
    limit: Annotated[int, option("Rows to show.", min=1, max=500)] = 20,
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
    show(table(headings, cells, f"{name}, {division} division", left_aligned=("team", "entry", "status")))
