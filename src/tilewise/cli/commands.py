"""The list of commands, in the order and the groups that `tilewise --help` shows."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer

from tilewise.cli.every import prepare_all

# Headings of `tilewise --help` with their commands; those of an add-on appear when it is installed.
HEADINGS = {
    "Learn and measure": ("tour", "check", "lab", "machine", "profile", "ladder"),
    "Make models fast": ("run", "fit", "quantize", "prune", "generate", "kv"),
    "Choose tiles": ("tiles", "collect", "tune", "calibrate", "lock", "store"),
    "Compete and share": ("compete", "fleet"),
}


# Commands that are one function, with the module that has it; each module imports its work late.
_FUNCTIONS = {
    "tour": "tour",
    "check": "lessons",
    "lab": "lessons",
    "machine": "machine",
    "profile": "profile",
    "ladder": "ladder",
    "run": "run",
    "fit": "optimize.fit",
    "quantize": "optimize.quantize",
    "prune": "optimize.prune",
    "generate": "optimize.generate",
    "kv": "optimize.generate",
    "tune": "tune",
    "calibrate": "calibrate",
}


def register(app: typer.Typer) -> None:
    """Attach every command to the application."""
    from tilewise._addons import register_commands
    from tilewise.cli.collect import collect
    from tilewise.cli.compete import compete
    from tilewise.cli.help import Sections
    from tilewise.cli.lock import lock
    from tilewise.cli.store import store
    from tilewise.cli.tiles.app import tiles

    register_functions(app, *_FUNCTIONS)
    groups = {"tiles": tiles, "collect": collect, "lock": lock, "store": store, "compete": compete}
    for name, group in groups.items():
        app.add_typer(group, name=name, cls=Sections)
    register_commands(app)
    prepare_all(app)


def register_functions(app: typer.Typer, *names: str) -> None:
    """Attach some commands that are one function, and the options before a command's name."""
    from tilewise.cli.help import options

    app.callback()(options)
    for name in names:
        app.command()(getattr(import_module(f"tilewise.cli.{_FUNCTIONS[name]}"), name))
    prepare_all(app)


def is_function(name: str) -> bool:
    """Whether a command is one function: to run it, no other command has to be built."""
    return name in _FUNCTIONS


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
