"""`tilewise replay`: how fast each way of tuning finds a good configuration, from recorded runtimes alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def replay(
    collection: Annotated[str, typer.Argument(help="An embedded collection's name, a folder, or a file.")] = "h200",
    split: Annotated[str, typer.Option(help="Which kernels: test, valid or train.")] = "test",
    model: Annotated[
        Path | None, typer.Option(help="A model file (default: the one shipped for the collection).")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the curves to this picture.")] = None,
    most: Annotated[int, typer.Option(help="Follow up to this many measurements.", min=1)] = 20,
    trees: Annotated[bool, typer.Option(help="Compare with gradient-boosted trees, trained now.")] = True,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="First fit the tuner's Gaussian process on the validation kernels and save it."
        ),
    ] = False,
    without_model: Annotated[
        bool,
        typer.Option("--without-model", help="Replay without the model: what earlier problems tell about the next."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the random orders and of the trees.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Replay tuning on held-out kernels: mean slowdown against the number of measurements, strategy by strategy.

    Example: tilewise replay h200 --plot replay.png
    """
    from tilewise.tune.search.replay import plot as draw
    from tilewise.tune.search.replay import recalibrate, table
    from tilewise.tune.search.replay import replay as run

    if without_model:
        _without_model(collection, seed, as_json)
        return
    if calibrate:
        typer.echo(f"wrote {recalibrate(collection, model)}", err=True)
    result = run(
        collection,
        split=split,
        model=model,
        most=most,
        trees=trees,
        seed=seed,
        say=lambda line: typer.echo(line, err=True),
        progress=True,
    )
    if plot is not None:
        draw(result, plot)
    typer.echo(json.dumps(result.as_dict()) if as_json else "\n".join(table(result)))


def _without_model(collection: str, seed: int, as_json: bool) -> None:
    from dataclasses import asdict

    from tilewise.tune.search.without_model import replay_without_model, table

    found = replay_without_model(collection, seed=seed)
    typer.echo(json.dumps(asdict(found)) if as_json else "\n".join(table(found)))
