"""The add-on's commands: `tilewise fleet` and `tilewise store token`."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Attach the commands to tilewise's command line (entry-point group `tilewise.commands`)."""
    from tilewise.cli.store import store
    from tilewise_fleet.cli.serve import serve
    from tilewise_fleet.cli.token import token
    from tilewise_fleet.cli.up import fleet

    fleet.command()(serve)
    app.add_typer(fleet, name="fleet")
    store.command()(token)
