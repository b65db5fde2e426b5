"""The list of commands, in the order `tilewise --help` shows them."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Attach every command to the application. Each module defines thin Typer functions that import their work late."""
    from tilewise.cli.machine import machine

    app.command()(machine)
