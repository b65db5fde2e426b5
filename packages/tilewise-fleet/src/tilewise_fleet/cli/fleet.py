"""`tilewise fleet`: the service, and a fleet on one machine to try it out; `tilewise store token` for its clients."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli.every import AsJson, answer
from tilewise.cli.store import Where
from tilewise.errors import ConfigurationError
from tilewise.store.database import is_url
from tilewise.web.listening import format_address, freeze_imports, listen, require_uvicorn

fleet = typer.Typer(help="Many machines: collect, train and answer together (docs/fleet.md).", no_args_is_help=True)


@fleet.callback()
def about() -> None:
    """Many machines: collect, train and answer together (docs/fleet.md)."""


@fleet.command()
def up(
    store: Annotated[str, typer.Option(help="The store: a file, or a postgresql:// URL.")] = "fleet.sqlite",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the service.")] = 8100,
    ray_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of Ray.")] = 6379,
    cpus: Annotated[int, typer.Option(min=1, max=1024, help="Trials of `tiles train --ray` that run at once.")] = 1,
) -> None:
    """Start a fleet on this machine: a Ray cluster with one slot, a store and a service, until Ctrl-C.

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


def serve(
    store: Annotated[str, typer.Option(help="The store: a file, or a postgresql:// URL.")] = "measurements.sqlite",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8100,
    rate: Annotated[
        float,
        typer.Option(min=0, help="Requests per second that may add measurements with one token, times 10 in all."),
    ] = 50.0,
    open_to_all: Annotated[
        bool, typer.Option("--no-tokens", help="Accept measurements without a token; only on 127.0.0.1.")
    ] = False,
) -> None:
    """Serve tuned configurations, from measurements or the cost model, and accept measurements.

    Example: tilewise fleet serve --store postgresql://tilewise@db/measurements --port 8100
    """
    require_uvicorn()
    from tilewise.web.connections import GuardedServer, allow_files
    from tilewise_fleet.service.app import create_app

    if not is_url(store) and not Path(store).exists():
        raise ConfigurationError(
            f"There is no store at {store[:200]}; `tilewise collect` or `tilewise store token` creates one."
        )
    if open_to_all and host not in ("127.0.0.1", "localhost", "::1"):
        raise ConfigurationError("--no-tokens works on one machine only; leave --host at 127.0.0.1.")
    app = create_app(store, rate=rate, tokens=not open_to_all)
    allow_files()
    listening = listen(host, port)
    freeze_imports()
    server = GuardedServer(app, listening)
    server.stop_on_signals()
    typer.echo(f"the service is at http://{format_address(listening)}; its page is /docs")
    sys.stdout.flush()
    server.run(sockets=[])


def token(
    where: Where,
    machine: Annotated[
        str | None,
        typer.Option("--machine", help="The machine that may use it, as `store info` names it (default: any)."),
    ] = None,
    revoke: Annotated[
        str | None, typer.Option(help="Revoke this token, or the token with this short name, instead.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a token with which a machine may send measurements to `tilewise fleet serve`. It is printed only once.

    Example: tilewise store token measurements.sqlite --machine "triton NVIDIA H200"
    """
    from tilewise.store.store import Store
    from tilewise_fleet.service.tokens import ANY_MACHINE, create_token, revoke_token

    with Store(where) as store:
        if revoke is not None:
            revoke_token(store, revoke)
            return answer(as_json, {"revoked": revoke}, "The token is revoked.")
        secret = create_token(store, machine or ANY_MACHINE)
    answer(as_json, {"token": secret}, secret)
