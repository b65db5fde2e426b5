"""The `tilewise` command: one Typer application, one module per command.

A command's module is imported only when it is run, so `tilewise --help` stays quick. A TilewiseError becomes one
sentence on stderr and exit code 2; nothing else is caught.
"""

from __future__ import annotations

import sys

import typer

from tilewise.errors import TilewiseError

app = typer.Typer(
    name="tilewise",
    help="Measure tensor programs, learn which tile is fastest, and make a small tensor framework fast for real.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the console script."""
    from tilewise.cli import commands

    commands.register(app)
    try:
        app()
    except TilewiseError as error:
        typer.echo(f"tilewise: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
