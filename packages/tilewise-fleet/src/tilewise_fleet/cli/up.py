"""`tilewise fleet`: a fleet on one machine, to try it out."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

fleet = typer.Typer(help="Many machines: collect, train and answer together (docs/fleet.md).", no_args_is_help=True)


@fleet.callback()
def about() -> None:
    """Many machines: collect, train and answer together (docs/fleet.md)."""


@fleet.command()
def up(
    store: Annotated[str, typer.Option(help="The store: a file, or a postgresql:// URL.")] = "fleet.sqlite",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where the service listens.")] = 8100,
    ray_port: Annotated[int, typer.Option(min=1, max=65535, help="Where Ray listens.")] = 6379,
    cpus: Annotated[int, typer.Option(min=1, max=1024, help="Trials of `tiles train --ray` at once.")] = 1,
) -> None:
    """Start a fleet on this machine: a Ray with one slot, a store and a service, until Ctrl-C.

    Example: tilewise fleet up --store fleet.sqlite
    """
    from tilewise_fleet.up import running_fleet

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        with running_fleet(store, port, ray_port, cpus) as running:
            typer.echo(f"Ray is at {running.address}, the service at {running.url}. Now, in another terminal:")
            typer.echo(f"  tilewise collect cpu --ray {running.address} --store {store} --minutes 5")
            typer.echo(f"  tilewise tiles train cpu --ray {running.address} --draws 4 --out sweep")
            typer.echo("Ctrl-C stops everything; the measurements stay in the store.")
            sys.stdout.flush()
            running.wait()
    except (KeyboardInterrupt, SystemExit):
        typer.echo("stopped")
