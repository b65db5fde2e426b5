"""`tilewise tiles board`: collections and models in one table, with intervals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def board(
    collections: Annotated[list[str], typer.Argument(help="Folders, or embedded collections: h200, cpu.")],
    models: Annotated[
        str, typer.Option(help="Separated by commas: names to train, model files, or shipped.")
    ] = "shipped",
    out: Annotated[Path, typer.Option(help="The file of results; pairs that are in it are not done again.")] = Path(
        "board.json"
    ),
    split: Annotated[str, typer.Option(help="train, valid or test.")] = "test",
    epochs: Annotated[int | None, typer.Option(help="Passes over the train split.")] = None,
    max_seconds: Annotated[
        float | None, typer.Option(help="Stop training a model after this many seconds.", min=0.1)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of every random choice.")] = 0,
    limit: Annotated[int | None, typer.Option(help="Read at most this many kernels of each split.", min=1)] = None,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Folder for the converted data (default: your cache folder).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Evaluate models on several collections, beside what they must beat; a run that was cut off goes on.

    Example: tilewise tiles board h200 cpu --models shipped,GBDT --out board.json
    """
    from rich.table import Table

    from tilewise.cli.tables import show
    from tilewise.costmodel.board import HEADINGS, board_lines, fill_board

    settings: dict[str, Any] = {"epochs": epochs, "max_seconds": max_seconds}
    names = [name.strip() for name in models.split(",") if name.strip()]
    path = out.expanduser()
    rows = fill_board(path, collections, names, split=split, seed=seed, cache_dir=cache_dir, limit=limit, **settings)
    if as_json:
        return typer.echo(json.dumps({"board": rows}, indent=1))
    table = Table(title=f"{path} (mean over kernels, 95 % interval)", title_justify="left")
    for place, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if place < 3 else "right")
    for line in board_lines(rows):
        table.add_row(*line)
    show(table)
