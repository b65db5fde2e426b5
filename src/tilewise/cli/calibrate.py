"""`tilewise calibrate`: tune common kernels for a minute; every later process uses the tiles that won."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tilewise._wording import pluralize
from tilewise.cli.every import AsJson, answer, option, output_folder
from tilewise.cli.tables import progress_bar, show, table


def calibrate(
    shapes: Annotated[Path | None, option("A JSON list of shapes of your own (default: a few dozen kernels).")] = None,
    minutes: Annotated[float, option("About how long to measure.", min=0.05, max=600)] = 1.0,
    threads: Annotated[
        int | None, option("Measure with one thread and with this many (default: one per core).", min=1, max=64)
    ] = None,
    cache: Annotated[
        Path | None, output_folder(help="Folder of calibrations and choices (default: your cache folder).")
    ] = None,
    show: Annotated[bool, option("Only show what is stored for this machine.")] = False,
    reset: Annotated[bool, option("Delete this machine's calibration.")] = False,
    seed: Annotated[int, option("Seed of the inputs on which a choice is validated.", min=0)] = 1,
    as_json: AsJson = False,
) -> None:
    """Tune a few dozen kernels on this machine, or your own shapes; tiles that win are used from then on.

    Example: tilewise calibrate --minutes 1
    """
    from tilewise.tune.families.cpu.family import require_native

    require_native()
    if show or reset:
        _show_or_reset(cache, reset, as_json)
        return
    report = _run(shapes, minutes, threads, cache, seed)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _print(report)


def _run(shapes: Path | None, minutes: float, threads: int | None, cache: Path | None, seed: int) -> dict[str, Any]:
    """Calibrate with a progress display; after Ctrl-C, report the kernels tuned so far and exit with code 130."""
    from tilewise.tune.choose.calibrate import calibrate

    problems = None if shapes is None else _problems(shapes)
    last_progress = (1, 1)
    with progress_bar(_log_every_twentieth) as progress:

        def report_progress(done: int, total: int, text: str) -> None:
            nonlocal last_progress
            last_progress = done, total
            progress(done, total, text)

        try:
            return calibrate(
                problems, folder=cache, minutes=minutes, threads=threads, seed=seed, progress=report_progress
            )
        except KeyboardInterrupt:
            done, total = last_progress
            typer.echo(f"Stopped; {done - 1} of {total} kernels are tuned; the same command continues.", err=True)
            raise typer.Exit(130) from None


def _problems(shapes: Path) -> list[Any]:
    """Read the problems of a file; those without a thread count get the current one."""
    from tilewise.store.problem import read_shapes
    from tilewise.tune.measure.cpu.device import CpuDevice

    device = CpuDevice()
    return [kernel.problem for kernel in read_shapes(shapes, lambda family, spec: device.problem(spec))]


def _log_every_twentieth(done: int, total: int | None, text: str) -> None:
    if done % 20 == 1 or total == 1:
        typer.echo(f"{done}/{total} {text}", err=True)


def _print(report: Mapping[str, Any]) -> None:
    """Print the result of a calibration: a table of kernel families and a summary."""
    headings = ("kernels", "threads", "tuned", "replaced", "default", "chosen", "worst", "best")
    counts, ratios = ("family", "threads", "kernels", "replaced"), ("speedup", "worst", "best")
    rows = [
        (*(line[name] for name in counts), "1.000x", *(f"{line[name]:.3f}x" for name in ratios))
        for line in report["lines"]
    ]
    show(table(headings, rows, "The chosen tiles, interleaved with the default"))
    typer.echo(f"{pluralize(report['kernels'], 'kernel')} in {report['seconds']:.0f} s on {report['machine']}.")
    if report["left"]:
        typer.echo(
            f"{pluralize(report['left'], 'kernel')} not decided: the time was up or the machine was busy; "
            "the same command continues."
        )
    if report["busy"]:
        typer.echo(
            f"Other programs used the CPU while {pluralize(report['busy'], 'kernel')} ran; small gains are then lost."
        )
    if report["replaced"]:
        typer.echo(f"Stored in {report['path']} and used from now on; TILEWISE_TUNED=0 switches that off.")
    else:
        typer.echo("No tile is reliably faster than the defaults, so they stay in use.")


def _show_or_reset(cache: Path | None, reset: bool, as_json: bool) -> None:
    """Print the calibration that is stored for this machine, or delete it."""
    from tilewise.errors import UnavailableError
    from tilewise.tune.choose.cache import ChoiceFile, cache_folder
    from tilewise.tune.choose.calibrate import forget
    from tilewise.tune.choose.tuned_table import CALIBRATED, load_tuned_table, machine_name
    from tilewise.tune.families.cpu.family import require_native

    module, path = require_native(), (cache or cache_folder()) / CALIBRATED
    if reset:
        try:
            existed = forget(cache)
        except OSError as error:
            raise UnavailableError(f"{path} cannot be removed ({error.strerror or error}).") from error
        sentence = f"Removed {path}." if existed else "There is no calibration of this machine to forget."
        return answer(as_json, {"removed": existed, "path": path}, sentence)
    own = ChoiceFile(path, machine_name(module)).all()
    tuned_table, notes = load_tuned_table(module, cache)
    families = sorted({choice.problem.family for choice in own})
    facts = {"path": path, "calibrated": bool(own), "families": families, "notes": notes}
    kernels = f"{path}: {pluralize(len(own), 'kernel')} of {', '.join(families)}."
    uncalibrated = "This machine is not calibrated; `tilewise calibrate` takes about a minute."
    stored = f"{len(tuned_table.tiles)} tuned tiles are stored for this machine."
    answer(as_json, facts | {"tiles": len(tuned_table.tiles)}, kernels if own else uncalibrated, stored, *notes)
