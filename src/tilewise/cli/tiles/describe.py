"""`tilewise tiles describe`: summarize a collection of measured kernels as a table, JSON or a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewise.cli.every import AsJson, answer, argument, option, output_picture
from tilewise.cli.tables import show, table

if TYPE_CHECKING:
    from rich.table import Table

    from tilewise.costmodel.data.describe import CollectionSummary, GroupFigures

_PICTURE_FIELDS = ("slowdowns", "deviations")


def describe(
    collection: Annotated[str, argument("A folder, a file, or an embedded collection: h200, cpu.")],
    programs: Annotated[bool, option("Also print one line per program.")] = False,
    plot: Annotated[
        Path | None, output_picture(help="Also draw spread and noise into this picture (.png, .svg).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Describe a collection: its kernels, how far apart best and worst tiles are, what a fixed choice loses, the noise.

    Example: tilewise tiles describe h200 --plot h200.png
    """
    from tilewise.costmodel.data.describe import describe as measure

    figures = measure(collection, progress=not as_json)
    if as_json:
        answer(as_json, {name: value for name, value in vars(figures).items() if name not in _PICTURE_FIELDS})
    else:
        _print(figures, programs)
    if plot is not None:
        draw(figures, plot)
        typer.echo(f"Drew {plot}.", err=as_json)


def _print(figures: CollectionSummary, programs: bool) -> None:
    """Print the summary of a collection as tables."""
    days = f", measured {' to '.join(dict.fromkeys(figures.measured))}" if figures.measured else ""
    typer.echo(f"{figures.name}: {figures.hardware or 'hardware not named'}{days}")
    own = figures.columns[24:]
    typer.echo(f"{len(figures.columns)} columns a configuration, its own: {', '.join(own) or 'none'}")
    rows = []
    for split, count in figures.splits.items():
        note = "" if count.labelled or not count.kernels else " (no runtimes)"
        rows.append((f"{split}{note}", count.kernels, count.configs, count.programs))
    show(table(("split", "kernels", "configurations", "programs"), rows, "Contents"))
    if figures.total is None:
        return
    show(_table("family", {**figures.families, "all": figures.total}))
    if programs:
        show(_table("program", figures.programs))


def _table(what: str, groups: dict[str, GroupFigures]) -> Table:
    """Build a table of runtimes and losses, one row per family or program (`what` is its first heading)."""
    title = "Slower than the best by: a fixed choice, the default, the fifth best; worst and median over best"
    headings = (what, "kernels", "configs", "best, us", "worst", "median", "fifth", "fixed", "default", "noise")
    rows = [
        (
            name, group.kernels, group.configs, " to ".join(dict.fromkeys(f"{bound:.3g}" for bound in group.best_us)),
            f"{group.spread:.1f}x", f"{group.median_config:.2f}x", f"{group.fifth_best_loss:.1%}",
            f"{group.fixed_loss:.0%}", f"{group.default_loss:.0%}",
            "-" if group.noise is None else f"{group.noise:.2%}",
        )
        for name, group in groups.items()
    ]  # fmt: skip
    return table(headings, rows, title)


def draw(figures: CollectionSummary, path: Path) -> None:
    """Draw the share of configurations within a factor of the best (left) and the noise of repeats (right)."""
    import numpy as np

    from tilewise.cli.pictures import picture

    with picture(path, 11, 4.5, columns=2) as (left, right):
        for family, values in figures.slowdowns.items():
            left.plot(np.sort(values), np.linspace(0, 1, len(values)), label=family)
        left.set(xscale="log", xlabel="runtime over the kernel's best", ylabel="share of configurations")
        left.set_title(f"{figures.name}: spread of the configurations")
        for family, values in figures.deviations.items():
            if len(values):
                right.plot(np.sort(values) * 100, np.linspace(0, 1, len(values)), label=family)
        right.set(xscale="log", xlabel="relative deviation of repeated timings, %", ylabel="share of configurations")
        right.set_title("noise")
        for axes in (left, right):
            axes.grid(True, which="both", alpha=0.3)
        left.legend()
