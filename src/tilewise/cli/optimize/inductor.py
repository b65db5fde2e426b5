"""`tilewise store inductor report`: what tilewise chose for PyTorch's compiler on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli.every import AsJson

inductor = typer.Typer(help="PyTorch's compiler with tilewise choosing its templates.", no_args_is_help=True)


@inductor.callback()
def _group() -> None:
    """PyTorch's compiler with tilewise choosing its templates (`tilewise.inductor.enable()`)."""


@inductor.command()
def report(
    folder: Annotated[Path | None, typer.Option(help="Records elsewhere than in the cache folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what was skipped, kept, measured and remembered, product by product.

    Example: tilewise store inductor report
    """
    from tilewise.gpu.inductor.decision_log import report as summarise

    summary = summarise(folder)
    if as_json:
        return typer.echo(json.dumps(summary.as_json()))
    if not summary.products:
        return typer.echo("Nothing yet: call tilewise.inductor.enable() before torch.compile.")
    for row in summary.rows:
        fastest = f"; fastest {row.fastest}, {row.speedup:.2f}x of ATen's speed" if row.fastest else ""
        typer.echo(f"{row.product}: {row.considered} templates, {row.selected} kept ({row.reason}){fastest}")
    skipped = summary.considered - summary.selected
    typer.echo(
        f"{summary.products} products: {skipped} of {summary.considered} templates skipped, "
        f"{summary.benchmarked} products measured, {summary.earlier_winners} remembered; "
        f"choosing took {summary.selection_seconds * 1e3:.1f} ms in all."
    )
