"""Something to look at while one long step runs: a spinner on a terminal, a line in a log."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say `what` is going on until the block ends."""
    if not sys.stderr.isatty():
        typer.echo(f"{what} …", err=True)
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield
