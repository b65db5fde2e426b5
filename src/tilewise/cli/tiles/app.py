"""`tilewise tiles`: commands of the learned cost model."""

from __future__ import annotations

import typer

from tilewise.cli.help import Sections
from tilewise.cli.tiles import data, describe, models
from tilewise.cli.tiles.layout import layout
from tilewise.cli.tiles.replay import replay

tiles = typer.Typer(help="Learn from measured kernels which tile is fastest, and rank tiles.", no_args_is_help=True)
data.attach(tiles)
tiles.command()(describe.describe)
models.attach(tiles)
tiles.command()(models.board)
tiles.command()(replay)
tiles.add_typer(layout, name="layout", cls=Sections)
