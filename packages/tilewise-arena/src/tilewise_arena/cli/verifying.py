"""`tilewise compete verify`: check a board's ledger and what the board shows against it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tilewise.cli.every import AsJson
from tilewise_arena.cli.options import DEFAULT_BOARD, BoardOption, KeyOption, open_board


def verify(
    where: BoardOption = DEFAULT_BOARD,
    head: Annotated[str | None, typer.Option(help="A hash noted earlier, such as a receipt's.")] = None,
    key: KeyOption = None,
    as_json: AsJson = False,
) -> None:
    """Check a board's ledger, and what the board shows against it; exit code 1 if anything is wrong.

    Example: tilewise compete verify --board board.sqlite
    """
    from tilewise_arena.board import verify as check
    from tilewise_arena.board.verify import NOT_COVERED

    with open_board(where, key) as board:
        verdict = check(board, head)
    if as_json:
        print(json.dumps(verdict.as_dict()))
    else:
        print(f"links: {verdict.links}, entries: {verdict.entries}, last hash: {verdict.head}")
        print("the board is whole" if verdict.good else "\n".join(verdict.faults))
        print("not covered: " + "; ".join(NOT_COVERED))
        if not verdict.sealed:
            print("the board's key is not here, so its seals were not checked")
    if not verdict.good:
        raise typer.Exit(1)
