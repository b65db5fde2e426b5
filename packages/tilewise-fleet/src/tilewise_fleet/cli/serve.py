"""`tilewise fleet serve`: an HTTP service that answers from one store and adds measurements to it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tilewise.errors import ConfigurationError
from tilewise.store.database import is_url
from tilewise.web.listening import format_address, freeze_imports, listen, require_uvicorn


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
