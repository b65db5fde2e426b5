"""The add-on's commands: what a teacher and a server do with a board, under `tilewise compete`."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Attach the commands to `tilewise compete` (entry-point group `tilewise.commands`)."""
    from tilewise.cli.compete import compete
    from tilewise_arena.cli import serving, teaching

    token = typer.Typer(no_args_is_help=True, help="Create, list and revoke tokens.")
    token.command("create")(teaching.token_create)
    token.command("revoke")(teaching.token_revoke)
    token.command("list")(teaching.token_list)
    for command in (
        serving.serve, teaching.verify, serving.work, serving.rerun, teaching.event, teaching.disqualify,
        teaching.reinstate, teaching.roster, teaching.grades, teaching.backup, teaching.restore,
    ):  # fmt: skip
        compete.command()(command)
    compete.add_typer(token, name="token")
