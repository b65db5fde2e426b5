"""`tilewise inductor report`: what tilewise chose for PyTorch's compiler on this machine."""

from __future__ import annotations

import dataclasses
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
    """What was skipped, kept, measured and remembered, product by product.

    Example: tilewise inductor report
    """
    from tilewise.gpu.inductor.records import summary

    found = summary(folder)
    if as_json:
        return typer.echo(json.dumps(dataclasses.asdict(found)))
    if not found.products:
        return typer.echo("Nothing yet: call tilewise.inductor.enable() before torch.compile.")
    for row in found.rows:
        chosen = f"; fastest {row.fastest}, {row.of_aten:.2f}x of ATen's speed" if row.fastest else ""
        typer.echo(f"{row.product}: {row.considered} templates, {row.kept} kept ({row.why}){chosen}")
    skipped = found.considered - found.kept
    typer.echo(
        f"{found.products} products: {skipped} of {found.considered} templates skipped, {found.measured} products "
        f"measured, {found.remembered} remembered; choosing took {found.choosing_seconds * 1e3:.1f} ms in all."
    )
