"""Options that the board's commands share, and opening the board they are about."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tilewise_arena.board import Board

BoardOption = Annotated[str, typer.Option("--board", help="A file, or a postgresql:// URL.")]
KeyOption = Annotated[Path | None, typer.Option("--key", help="The board's key file; beside a board file by default.")]
ImagesOption = Annotated[
    str | None, typer.Option(help="An npz of digits x and classes y that only you have, to measure accuracy on.")
]
DEFAULT_BOARD = "board.sqlite"
BY = "command line"  # the author of a change, in the ledger


def open_board(where: str, key: Path | None = None, create: bool = False) -> Board:
    from tilewise_arena.board import open_board

    return open_board(where, create=create, key=key)
