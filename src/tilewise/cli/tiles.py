"""`tilewise tiles`: the learned cost model's commands, in the order of a working day."""

from __future__ import annotations

import typer

from tilewise.cli import tiles_data, tiles_describe, tiles_models

tiles = typer.Typer(help="Learn from measured kernels which tile is fastest, and rank tiles.", no_args_is_help=True)
tiles_data.attach(tiles)
tiles.command()(tiles_describe.describe)
tiles_models.attach(tiles)
