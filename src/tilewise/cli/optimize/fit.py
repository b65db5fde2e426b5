"""`tilewise fit`: train a reference model, with a bar on a terminal and plain lines in a log."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise.cli.every import check_output

if TYPE_CHECKING:
    from tilewise.fit import FitResult, Progress


def fit(
    model: Annotated[str, typer.Argument(help="mlp, cnn or gpt.")],
    data: Annotated[
        str | None,
        typer.Option(
            help="A folder with the MNIST files (mlp, cnn) or a text file (gpt).",
            show_default="digits or Python's topics",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the checkpoint and the model.", show_default="out/fit-MODEL")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="At most this many passes over the data.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and the order of the data.")] = 0,
    threads: Annotated[int | None, typer.Option(help="Threads of the native kernels.")] = None,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 50,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start again instead of continuing from the folder's checkpoint.")
    ] = False,
    csv: Annotated[Path | None, typer.Option(help="File for the losses and scores as CSV, a line per epoch.")] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Folder for the losses and scores as TensorBoard reads them.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a reference model and save it; after an interruption the same command continues.

    Example: tilewise fit cnn --seed 1 --out out/cnn
    """
    from tilewise import set_num_threads
    from tilewise.cli.optimize.fit_progress import Bar, Lines
    from tilewise.fit import fit as run_fit
    from tilewise.fit import recipe_for
    from tilewise.fit.logs import CsvLog, TensorBoardLog, Together

    if threads is not None:
        set_num_threads(threads)
    recipe = recipe_for(model, data, epochs, seed, lr)
    folder = out or Path("out") / f"fit-{model}"
    check_output(folder, folder=True)
    watchers: list[Progress] = [Bar() if sys.stderr.isatty() else Lines()]
    watchers += [CsvLog(csv)] if csv is not None else []
    watchers += [TensorBoardLog(tensorboard)] if tensorboard is not None else []
    result = run_fit(recipe, folder, checkpoint_every, fresh, Together(watchers))
    print(_as_json(result) if as_json else _as_text(result))
    if not result.finished:
        raise typer.Exit(130)


def _as_json(result: FitResult) -> str:
    plain: dict[str, Any] = dataclasses.asdict(result)
    return json.dumps(plain | {k: v and str(v) for k, v in plain.items() if k.endswith("_path")}, indent=2)


def _as_text(result: FitResult) -> str:
    if not result.finished:
        return f"Interrupted after {result.steps} steps; run the same command to go on from {result.checkpoint_path}."
    scores = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in result.scores.items())
    why = ", stopped early" if result.stopped_early else ""
    return (
        f"{scores} with the weights of epoch {result.best_epoch} of {result.epochs}{why}; saved as {result.model_path}"
    )
