"""What the commands of `tilewise compete` share: options, and the board they are about."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tilewise.bench.board import Board

BoardOption = Annotated[str, typer.Option("--board", help="A file, or a postgresql:// URL.")]
KeyOption = Annotated[Path | None, typer.Option("--key", help="The board's key file; beside a board file by default.")]
ThreadsOption = Annotated[int, typer.Option(min=1, max=64, help="Threads of both sides.")]
ImagesOption = Annotated[
    str | None, typer.Option(help="An npz of digits x and classes y that only you have, to measure accuracy on.")
]
DEFAULT_BOARD = "board.sqlite"
BY = "command line"  # who did it, in the ledger


def opened_board(where: str, key: Path | None = None, create: bool = False) -> Board:
    from tilewise.bench.board import open_board

    return open_board(where, create=create, key=key)
