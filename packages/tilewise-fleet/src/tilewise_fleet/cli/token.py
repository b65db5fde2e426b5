"""`tilewise store token`: creates and revokes the tokens that `tilewise fleet serve` requires for measurements."""

from __future__ import annotations

from typing import Annotated

import typer

from tilewise.cli.every import AsJson, answer
from tilewise.cli.store import Where


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
