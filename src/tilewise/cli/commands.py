"""The list of commands, in the order and the groups that `tilewise --help` shows."""

from __future__ import annotations

from typing import Any

import typer

# Headings of `tilewise --help` with their commands; those of an add-on appear when it is installed.
HEADINGS = {
    "Learn and measure": ("tour", "check", "lab", "machine", "profile", "ladder"),
    "Make models fast": ("run", "fit", "quantize", "prune", "generate", "kv"),
    "Choose tiles": ("tiles", "collect", "tune", "calibrate", "replay", "lock", "store"),
    "Compete and share": ("compete", "fleet"),
}


def register(app: typer.Typer) -> None:
    """Attach every command to the application. Each module defines thin Typer functions that import their work late."""
    from tilewise._addons import register_commands
    from tilewise.cli.calibrate import calibrate
    from tilewise.cli.check import check
    from tilewise.cli.collect import collect
    from tilewise.cli.compete.app import compete
    from tilewise.cli.every import prepare_all
    from tilewise.cli.help import Sections
    from tilewise.cli.lab import lab
    from tilewise.cli.ladder import ladder
    from tilewise.cli.lock import lock
    from tilewise.cli.machine import machine
    from tilewise.cli.optimize.fit import fit
    from tilewise.cli.optimize.generate import generate, kv
    from tilewise.cli.optimize.prune import prune
    from tilewise.cli.optimize.quantize import quantize
    from tilewise.cli.profile import profile
    from tilewise.cli.replay import replay
    from tilewise.cli.run import run
    from tilewise.cli.store import store
    from tilewise.cli.tiles.app import tiles
    from tilewise.cli.tour import tour
    from tilewise.cli.tune import tune
    from tilewise.cli.version import options

    app.callback()(options)
    functions = (
        tour, check, lab, machine, profile, ladder, run, fit, quantize, prune, generate, kv, tune, calibrate, replay,
    )  # fmt: skip
    for function in functions:
        app.command()(function)
    groups = {"tiles": tiles, "collect": collect, "lock": lock, "store": store, "compete": compete}
    for name, group in groups.items():
        app.add_typer(group, name=name, cls=Sections)
    register_commands(app)
    prepare_all(app)


def arrange(tree: Any) -> None:
    """Sort the top-level commands as in HEADINGS; commands of unknown add-ons follow under their own headings."""
    headings = {name: heading for heading, names in HEADINGS.items() for name in names}
    for name in headings.keys() & tree.commands.keys():
        tree.commands[name].rich_help_panel = headings[name]
    order = [
        *(name for name in headings if name in tree.commands),
        *(name for name in tree.commands if name not in headings),
    ]
    tree.commands = {name: tree.commands[name] for name in order}
