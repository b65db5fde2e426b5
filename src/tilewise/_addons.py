"""Add-on distributions: where their commands are registered, and what to say when one is not installed.

`tilewise-arena` (a board for a class) and `tilewise-fleet` (many machines) are separate packages on top of this one.
Each registers its commands through the entry-point group `tilewise.commands`; the core loads add-on modules by name,
and only when a user asks for what they do.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from tilewise.errors import UnavailableError

COMMANDS = "tilewise.commands"  # entry points: functions that take the Typer application

# Commands that exist only with an add-on, as typed after `tilewise`.
PROVIDED_BY = {
    "tilewise-arena": (
        "compete serve", "compete verify", "compete work", "compete rerun", "compete event", "compete disqualify",
        "compete reinstate", "compete roster", "compete grades", "compete backup", "compete restore", "compete token",
    ),
    "tilewise-fleet": ("fleet", "store token"),
}  # fmt: skip


def require(module: str, purpose: str) -> ModuleType:
    """Import a module of an add-on, or say in one sentence what to install.

    >>> require("tilewise_nothing.board", "a board").__name__
    Traceback (most recent call last):
    tilewise.errors.UnavailableError: a board needs tilewise-nothing: in a clone, pip install packages/tilewise-nothing
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        distribution = package.replace("_", "-")
        advice = f"in a clone, pip install packages/{distribution}"  # the name is not published
        raise UnavailableError(f"{purpose} needs {distribution}: {advice}") from None


def provider_of(command: str) -> str | None:
    """Return the add-on that provides a command, such as `compete serve`; None for the core's own."""
    return next((addon for addon, commands in PROVIDED_BY.items() if command in commands), None)


def register_commands(app: Any) -> None:
    """Let every installed add-on attach its commands to the command line."""
    from importlib.metadata import entry_points

    for entry in sorted(entry_points(group=COMMANDS), key=lambda entry: entry.name):
        entry.load()(app)
