"""`tilewise compete`: score and validate entries of the TinyMLPerf competition."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise._addons import require
from tilewise.cli.compete.options import ThreadsOption
from tilewise.cli.every import AsJson, answer, output_file
from tilewise.cli.tables import show, table, waiting
from tilewise.errors import UnavailableError

if TYPE_CHECKING:
    from tilewise.bench import CompetitionSubmission, Recipe, Settings
    from tilewise.bench.scoring import Score

compete = typer.Typer(no_args_is_help=True, help="TinyMLPerf: score entries, keep a board, serve it to a class.")

_ENTRY = "A recipe file, or `reference` for the entry that ships with tilewise."
EventOption = Annotated[str, typer.Option("--event", help="MLP_SPRINT, CNN_MARATHON, TRANSFORMER_DECATHLON …")]
EntryOption = Annotated[str, typer.Option("--entry", help=_ENTRY)]
TruthOption = Annotated[str | None, typer.Option(help="TILE_OLYMPIAD: a collection to score against (its test split).")]


@compete.command()
def run(
    event: EventOption = "MLP_SPRINT",
    entry: EntryOption = "reference",
    team: Annotated[str, typer.Option(help="Whose entry it is.")] = "me",
    plugin: Annotated[
        Path | None, typer.Option(help="Open division: a Python file, run in isolation with limits.")
    ] = None,
    threads: ThreadsOption = 1,
    truth: TruthOption = None,
    practice: Annotated[
        bool, typer.Option("--practice", help="Score on a busy machine too, with the interval; never ranked.")
    ] = False,
    out: Annotated[Path | None, output_file(help="Also write the result to this file as JSON.")] = None,
    as_json: AsJson = False,
) -> None:
    """Validate and score an entry on this machine, against plain tilewise in the same run.

    Example: tilewise compete run --event CNN_MARATHON --entry reference
    """
    from tilewise._files import write_atomic
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


def _register_board() -> None:
    from tilewise.cli.compete.board import register

    register(compete)


_register_board()
