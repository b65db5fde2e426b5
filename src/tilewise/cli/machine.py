"""`tilewise machine`: peak compute and bandwidth of this machine, measured once and stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewise._wording import pluralize
from tilewise.cli.every import AsJson, option, output_picture
from tilewise.cli.tables import show, table

if TYPE_CHECKING:
    from tilewise.profile.machine import MachineFigures


def machine(
    refresh: Annotated[bool, option("Measure again, even if results are stored.")] = False,
    as_json: AsJson = False,
    plot: Annotated[
        Path | None, output_picture(help="Also draw the rooflines into this picture (.png or .svg).")
    ] = None,
) -> None:
    """Measure the ceilings: multiply-adds by instruction set and threads, bandwidth by working-set size, caches.

    Example: tilewise machine --plot roofline.svg
    """
    from tilewise.profile.machine import cache_file
    from tilewise.profile.machine import machine as ceilings

    figures = ceilings(refresh=refresh)
    if as_json:
        typer.echo(json.dumps(figures.as_dict(), indent=1))
    else:
        _print(figures)
    if figures.doubts:
        typer.echo(f"Not stored, so it is measured again next time: {figures.doubts[0]}.", err=True)
    elif not cache_file().is_file():
        typer.echo(f"Not stored: {cache_file()} cannot be written, so it is measured again next time.", err=True)
    elif not as_json:
        typer.echo(f"Stored in {cache_file()}; `tilewise machine --refresh` measures again.")
    if plot is not None:
        draw(figures, plot)
        typer.echo(f"Drew {plot}.", err=as_json)


def _print(figures: MachineFigures) -> None:
    """Print the machine's caches, peaks and bandwidths as tables."""
    from tilewise.profile.units import bytes_, count

    caches = ", ".join(f"L{c.level} {bytes_(c.bytes)}" for c in figures.caches) or "unknown"
    typer.echo(f"{figures.cpu}, {pluralize(figures.cpus, 'CPU')}, caches {caches} ({figures.method})")
    counts = sorted({p.threads for p in figures.peaks})
    typer.echo("Peak in float32; a multiply-add is two operations")
    rates = {(p.isa, p.threads): f"{count(p.flops_per_second)}FLOP/s" for p in figures.peaks}
    peaks = [(isa, *(rates.get((isa, n), "") for n in counts)) for isa in dict.fromkeys(p.isa for p in figures.peaks)]
    show(table(("instruction set", *(pluralize(n, "thread") for n in counts)), peaks))

    top = max(b.copy for b in figures.bandwidths)
    title = "Bandwidth by working set (copy: read and written bytes together)"
    rows = []
    for b in figures.bandwidths:
        bar = "█" * max(1, round(24 * b.copy / top))
        rows.append((bytes_(b.bytes), b.threads, f"{count(b.read)}B/s", f"{count(b.copy)}B/s", bar))
    headings = ("working set", "threads", "read", "copy", "copy, drawn")
    show(table(headings, rows, title, left_aligned=headings[-1:]))
    typer.echo(f"Fresh memory (allocate, fill, free): {count(figures.fresh_memory)}B/s")


def draw(figures: MachineFigures, path: Path) -> None:
    """Draw the rooflines of main memory and of the smallest cache, for one thread and for all."""
    import numpy as np

    from tilewise.cli.pictures import picture
    from tilewise.profile.machine import active_isa
    from tilewise.profile.units import bytes_

    intensity = np.logspace(-2, 3, 200)
    smallest = min(b.bytes for b in figures.bandwidths)
    largest = max(b.bytes for b in figures.bandwidths)
    with picture(path, 8, 5) as axes:
        for threads in sorted({1, figures.cpus}):
            for size, style in ((smallest, "--"), (largest, "-")):
                roof = np.minimum(figures.peak(threads), intensity * figures.bandwidth(size, threads))
                axes.loglog(
                    intensity, roof / 1e9, style, label=f"{pluralize(threads, 'thread')}, working set {bytes_(size)}"
                )
        axes.set(xlabel="arithmetic intensity (FLOP per byte moved)", ylabel="GFLOP/s")
        axes.set_title(f"{figures.cpu}: rooflines ({active_isa()})")
        axes.grid(True, which="both", alpha=0.3)
        axes.legend()
