"""The add-on's commands: `tilewise fleet` and `tilewise store token`."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Attach the commands to tilewise's command line (entry-point group `tilewise.commands`)."""
    from tilewise.cli.store import store
    from tilewise_fleet.cli.fleet import fleet, serve, token

    fleet.command()(serve)
    app.add_typer(fleet, name="fleet")
    store.command()(token)
