"""The list of commands, in the order `tilewise --help` shows them."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Attach every command to the application. Each module defines thin Typer functions that import their work late."""
    from tilewise.cli.check import check
    from tilewise.cli.collect import collect
    from tilewise.cli.compete import compete
    from tilewise.cli.fit import fit
    from tilewise.cli.generate import generate, kv
    from tilewise.cli.ladder import ladder
    from tilewise.cli.machine import machine
    from tilewise.cli.profile import profile
    from tilewise.cli.prune import prune
    from tilewise.cli.quantize import quantize
    from tilewise.cli.replay import replay
    from tilewise.cli.tiles import tiles
    from tilewise.cli.tour import tour
    from tilewise.cli.tune import tune

    app.command()(tour)
    app.command()(machine)
    app.command()(profile)
    app.command()(ladder)
    app.command()(fit)
    app.command()(quantize)
    app.command()(prune)
    app.command()(generate)
    app.command()(kv)
    app.add_typer(tiles, name="tiles")
    app.add_typer(collect, name="collect")
    app.command()(check)
    app.add_typer(compete, name="compete")
    app.command()(tune)
    app.command()(replay)
