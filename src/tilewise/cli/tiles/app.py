"""`tilewise tiles`: commands of the learned cost model."""

from __future__ import annotations

import typer

from tilewise.cli.tiles import data, models
from tilewise.cli.tiles.describe import describe
from tilewise.cli.tiles.layout import layout
from tilewise.cli.tiles.replay import replay

tiles = typer.Typer(help="Learn from measured kernels which tile is fastest, and rank tiles.", no_args_is_help=True)
for _command in (
    data.download, data.from_pb, data.from_jax, data.import_, data.kaggle, data.score, describe,
    models.train, models.evaluate, models.predict, models.export, models.board, replay,
):  # fmt: skip
    tiles.command(_command.__name__.strip("_").replace("_", "-"))(_command)
tiles.add_typer(layout, name="layout")
