"""`tilewise calibrate`: a minute of measuring, after which tiles of shapes never met before suit this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise._wording import counted
from tilewise.cli.every import AsJson
from tilewise.cli.tables import progress_bar, show, table

if TYPE_CHECKING:
    from tilewise.tune.choose.calibration.run import Report


def calibrate(
    shapes: Annotated[
        Path | None,
        typer.Option(help="JSON list of five or more shapes of your own; their best tiles are stored too."),
    ] = None,
    minutes: Annotated[float, typer.Option(help="About how long to measure.", min=0.05, max=600)] = 1.0,
    threads: Annotated[
        int | None,
        typer.Option(help="Measure with one thread and with this many (default: one per core).", min=1, max=64),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder of calibrations and choices (default: your cache folder).")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Only show what is stored for this machine.")] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Forget this machine's calibration.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the choice of tiles to measure.", min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure a few dozen kernels on this machine and learn which tiles suit it; used from then on.

    Example: tilewise calibrate --minutes 1
    """
    from tilewise.tune.measure.cpu.clock import require_native

    require_native()
    if show or reset:
        _kept(cache, reset, as_json)
        return
    report = _run(shapes, minutes, threads, cache, seed)
    if as_json:
        typer.echo(json.dumps(report.as_dict()))
    else:
        _print(report)


def _run(shapes: Path | None, minutes: float, threads: int | None, cache: Path | None, seed: int) -> Report:
    from tilewise.profile.machine import machine
    from tilewise.tune.choose.calibration.run import Calibration

    problems = None if shapes is None else _problems(shapes)
    with progress_bar(_say_some) as progress:
        run = Calibration(problems, folder=cache, minutes=minutes, threads=threads, seed=seed, progress=progress)
        try:
            run.check_folder()
            progress(0, 1, "the machine's ceilings")
            machine()
            return run.run()
        except KeyboardInterrupt:
            done, every = len(run.measured), len(run.problems)
            typer.echo(f"Stopped; {done} of {every} kernels are measured, and the same command goes on.", err=True)
            raise typer.Exit(130) from None


def _problems(shapes: Path) -> list[Any]:
    """The problems of a file, as the framework would run them: on the threads in force, if they do not say."""
    from tilewise.tune.measure.cpu.device import CpuDevice
    from tilewise.tune.problem import read_shapes

    bench = CpuDevice()
    return [kernel.problem for kernel in read_shapes(shapes, lambda family, spec: bench.problem(spec))]


def _say_some(done: int, total: int | None, text: str) -> None:
    if done % 20 == 1 or total == 1:
        typer.echo(f"{done}/{total} {text}", err=True)


def _print(report: Report) -> None:
    headings = ("kernels", "threads", "measured", "replaced", "default", "calibrated", "worst", "best measured")
    counts, ratios = ("family", "threads", "kernels", "replaced"), ("speedup", "worst", "best")
    rows = [
        (*(line[name] for name in counts), "1.000x", *(f"{line[name]:.3f}x" for name in ratios))
        for line in report.lines
    ]
    show(table(headings, rows, "On kernels that the choice was made without"))
    measured = f"{counted(report.kernels, 'kernel')}, {counted(report.tiles, 'tile')}"
    typer.echo(f"{measured} in {report.seconds:.0f} s on {report.machine}.")
    if report.disturbed:
        typer.echo(f"{report.disturbed} measurements were disturbed and do not count; was the machine busy?", err=True)
    families = sorted({name.rstrip("+") for name, promise in report.promises.items() if promise is not None})
    if families:
        typer.echo(
            f"Kept in {report.path} and used from now on for {', '.join(families)}; TILEWISE_TUNED=0 switches it off."
        )
    else:
        typer.echo("Nothing beats the defaults for certain, so they stay; the tuner starts from what was measured.")
    if report.choices:
        typer.echo(f"Tiles of {report.choices} of your shapes are faster than the default and are kept as well.")


def _kept(cache: Path | None, reset: bool, as_json: bool) -> None:
    """Say what is kept, or forget it."""
    from tilewise.errors import UnavailableError
    from tilewise.tune.choose.calibration.calibrated import calibration_file, find_calibration
    from tilewise.tune.choose.kept import read_kept
    from tilewise.tune.measure.cpu.clock import require_native

    module = require_native()
    path = calibration_file(module, cache)
    if reset:
        existed = path.exists()
        try:
            path.unlink(missing_ok=True)
            path.with_suffix(".part.jsonl").unlink(missing_ok=True)
        except OSError as error:
            raise UnavailableError(f"{path} cannot be removed ({error.strerror or error}).") from error
        said = f"Removed {path}." if existed else "There is no calibration of this machine to forget."
        typer.echo(json.dumps({"removed": existed, "path": str(path)}) if as_json else said)
        return
    found, notes = find_calibration(module, cache)
    kept, more = read_kept(module, cache)
    families = (
        [] if found is None else sorted({name.rstrip("+") for name in found.families if found.covers(name.rstrip("+"))})
    )
    if as_json:
        told = {"path": str(path), "calibrated": found is not None, "families": families}
        typer.echo(json.dumps({**told, "tiles": len(kept.tiles), "notes": [*notes, *more]}))
        return
    if found is None:
        typer.echo("This machine is not calibrated; `tilewise calibrate` takes about a minute.")
    else:
        typer.echo(f"{path}: chooses tiles for {', '.join(families) or 'nothing; the defaults stay'}.")
    typer.echo(f"{len(kept.tiles)} tuned tiles are kept for this machine.")
    for note in (*notes, *more):
        typer.echo(note)
