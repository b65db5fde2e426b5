"""`tilewise fit`: train a reference model, with a progress bar on a terminal and plain lines in a log."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewise.cli.every import AsJson, Threads, answer, check_output, one_of, option, output_file, output_folder
from tilewise.cli.tables import progress_bar

if TYPE_CHECKING:
    from tilewise.cli.tables import Progress as Move
    from tilewise.fit import Epoch, FitResult, Progress


def fit(
    model: Annotated[str, one_of("mlp", "cnn", "resnet8", "gpt", declare=typer.Argument)],
    data: Annotated[
        str | None,
        option(
            "A folder with the MNIST files (images) or a text file (gpt).", show_default="digits or Python's topics"
        ),
    ] = None,
    out: Annotated[
        Path | None, output_folder(help="Folder for the checkpoint and the model.", show_default="out/fit-MODEL")
    ] = None,
    epochs: Annotated[int | None, option("At most this many passes over the data.")] = None,
    lr: Annotated[float | None, option("Peak learning rate.")] = None,
    seed: Annotated[int, option("Seed of the initial weights and the order of the data.")] = 0,
    threads: Threads = None,
    checkpoint_every: Annotated[int, option("Steps between checkpoints.", min=1)] = 50,
    fresh: Annotated[bool, option("Start again instead of continuing from the folder's checkpoint.")] = False,
    csv: Annotated[Path | None, output_file(help="File for the losses and scores as CSV, a line per epoch.")] = None,
    tensorboard: Annotated[
        Path | None, output_folder(help="Folder for the losses and scores in TensorBoard's format.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a reference model and save it; after an interruption the same command continues.

    Example: tilewise fit cnn --seed 1 --out out/cnn
    """
    from tilewise.fit import fit as run_fit
    from tilewise.fit import recipe_for
    from tilewise.fit.logs import CsvLog, TensorBoardLog

    recipe = recipe_for(model, data, epochs, seed, lr)
    folder = out or Path("out") / f"fit-{model}"
    check_output(folder, folder=True)
    logs: list[Progress] = [CsvLog(csv)] if csv is not None else []
    logs += [TensorBoardLog(tensorboard)] if tensorboard is not None else []
    with progress_bar(None) as move:
        result = run_fit(recipe, folder, checkpoint_every, fresh, [_watcher(move), *logs])
    answer(as_json, result, _describe_result(result))
    if not result.finished:
        raise typer.Exit(130)


def _watcher(move: Move | None) -> Progress:
    """Return an observer that prints a line per epoch and moves the progress bar, if there is one."""
    from tilewise.fit import Progress

    class ConsoleProgress(Progress):
        def start(self, epochs: int, steps_per_epoch: int, done: int) -> None:
            self.total = epochs * steps_per_epoch

        def step(self, step: int, loss: float) -> None:
            if move is not None:
                move(step, self.total, f"loss {loss:.3f}")

        def epoch(self, epoch: Epoch) -> None:
            summary = f"training loss {epoch.train_loss:.4f}, validation {epoch.score:.4f}{' *' * epoch.best}"
            print(f"epoch {epoch.epoch}: {summary}", file=sys.stderr, flush=True)

    return ConsoleProgress()


def _describe_result(result: FitResult) -> str:
    """Say in one sentence how training ended."""
    if not result.finished:
        return f"Interrupted after {result.steps} steps; the same command continues from {result.checkpoint_path}."
    scores = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in result.scores.items())
    why = ", stopped early" if result.stopped_early else ""
    return (
        f"{scores} with the weights of epoch {result.best_epoch} of {result.epochs}{why}; saved as {result.model_path}"
    )
