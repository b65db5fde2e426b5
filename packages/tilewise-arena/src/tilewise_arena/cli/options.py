"""Options that the board's commands share, and opening the board they are about."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewise.errors import ConfigurationError

if TYPE_CHECKING:
    from tilewise_arena.board import Board

BoardOption = Annotated[str, typer.Option("--board", help="A file, or a postgresql:// URL.")]
KeyOption = Annotated[
    Path | None, typer.Option("--key", help="The board's key file (default: next to the board file).")
]
ImagesOption = Annotated[
    str | None, typer.Option(help="An .npz file with hidden digits x and classes y, to measure accuracy on.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")]
DEFAULT_BOARD = "board.sqlite"
BY = "command line"  # the author of a change, in the ledger


def open_board(where: str, key: Path | None = None, create: bool = False) -> Board:
    """Open the board that a command names; the import is delayed to keep commands quick to start."""
    from tilewise_arena.board import open_board

    return open_board(where, create=create, key=key)


def check_new_file(path: Path, force: bool) -> None:
    """Raise an error if a file exists and may not be written over."""
    if path.exists() and not force:
        raise ConfigurationError(f"{path} exists; name another file, or write over it with --force")
