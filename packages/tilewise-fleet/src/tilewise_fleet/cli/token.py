"""`tilewise store token`: tokens with which machines send measurements to `tilewise serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from tilewise.cli.every import AsJson, answer
from tilewise.cli.store import Where


def token(
    where: Where,
    machine: Annotated[
        str | None,
        typer.Option("--machine", help="The machine it is for, as `store info` names it (default: any)."),
    ] = None,
    revoke: Annotated[
        str | None, typer.Option(help="Revoke this token, or the one with this short name, instead.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a token with which a machine may send measurements to `tilewise serve`. It is shown once.

    Example: tilewise store token measurements.sqlite --machine "triton NVIDIA H200"
    """
    from tilewise.store.store import Store
    from tilewise_fleet.service.tokens import ANY, create_token, revoke_token

    with Store(where) as opened:
        if revoke is not None:
            revoke_token(opened, revoke)
            return answer(as_json, {"revoked": revoke}, "It opens nothing any longer.")
        made = create_token(opened, machine or ANY)
    answer(as_json, {"token": made}, made)
