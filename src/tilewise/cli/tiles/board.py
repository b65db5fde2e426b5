"""`tilewise tiles board`: collections and models in one table, with intervals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tilewise.cli.every import AsJson, one_of, output_file
from tilewise.cli.tiles.options import CacheDir, Limit


def board(
    collections: Annotated[list[str], typer.Argument(help="Folders, or embedded collections: h200, cpu.")],
    models: Annotated[
        str, typer.Option(help="Separated by commas: names to train, model files, or shipped.")
    ] = "shipped",
    out: Annotated[Path, output_file(help="The file of results; pairs that are in it are not done again.")] = Path(
        "board.json"
    ),
    split: Annotated[str, one_of("train", "valid", "test")] = "test",
    epochs: Annotated[int | None, typer.Option(help="Passes over the train split.")] = None,
    max_seconds: Annotated[
        float | None, typer.Option(help="Stop training a model after this many seconds.", min=0.1)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of every random choice.")] = 0,
    limit: Limit = None,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate models and baselines on several collections; the same command continues an interrupted run.

    Example: tilewise tiles board h200 cpu --models shipped,GBDT --out board.json
    """
    from tilewise.cli.tables import show, table
    from tilewise.costmodel.board import HEADINGS, board_lines, fill_board

    settings: dict[str, Any] = {"epochs": epochs, "max_seconds": max_seconds}
    names = [name.strip() for name in models.split(",") if name.strip()]
    path = out.expanduser()
    rows = fill_board(path, collections, names, split=split, seed=seed, cache_dir=cache_dir, limit=limit, **settings)
    if as_json:
        return typer.echo(json.dumps({"board": rows}, indent=1))
    show(table(HEADINGS, board_lines(rows), f"{path} (mean over kernels, 95 % interval)", left=HEADINGS[:3]))
