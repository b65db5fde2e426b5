"""The list of commands, in the order and the panels that `tilewise --help` shows."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Attach every command to the application. Each module defines thin Typer functions that import their work late."""
    from tilewise._addons import register_commands
    from tilewise.cli.calibrate import calibrate
    from tilewise.cli.check import check
    from tilewise.cli.collect import collect
    from tilewise.cli.compete.app import compete
    from tilewise.cli.every import prepare_all
    from tilewise.cli.help import Sections
    from tilewise.cli.ladder import ladder
    from tilewise.cli.machine import machine
    from tilewise.cli.optimize.fit import fit
    from tilewise.cli.optimize.generate import generate, kv
    from tilewise.cli.optimize.inductor import inductor
    from tilewise.cli.optimize.prune import prune
    from tilewise.cli.optimize.quantize import quantize
    from tilewise.cli.profile import profile
    from tilewise.cli.replay import replay
    from tilewise.cli.run import run
    from tilewise.cli.store import store
    from tilewise.cli.tiles.app import tiles
    from tilewise.cli.tiles.layout import layout
    from tilewise.cli.tour import tour
    from tilewise.cli.tune import tune
    from tilewise.cli.version import options

    app.callback()(options)
    panels = {
        "Start here": (tour, check),
        "Measure": (machine, profile, ladder),
        "Make models fast": (run, fit, quantize, prune, generate, kv),
        "Learn tiles": (calibrate, tune, replay),
    }
    for panel, commands in panels.items():
        for command in commands:
            app.command(rich_help_panel=panel)(command)
    app.add_typer(tiles, name="tiles", cls=Sections, rich_help_panel="Learn tiles")
    app.add_typer(layout, name="layout", cls=Sections, rich_help_panel="Learn tiles")
    app.add_typer(collect, name="collect", cls=Sections, rich_help_panel="Learn tiles")
    app.add_typer(store, name="store", cls=Sections, rich_help_panel="Learn tiles")
    app.add_typer(inductor, name="inductor", cls=Sections, rich_help_panel="Learn tiles")
    app.add_typer(compete, name="compete", cls=Sections, rich_help_panel="Compete")
    register_commands(app)
    prepare_all(app)
