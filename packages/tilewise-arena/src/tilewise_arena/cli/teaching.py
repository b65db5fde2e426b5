"""`tilewise compete`, what a teacher does: tokens, events, disqualification, rosters, grades, backups."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from tilewise._wording import pluralize
from tilewise.cli.every import AsJson, answer, one_of, output_file
from tilewise.errors import ConfigurationError
from tilewise_arena.cli.options import (
    BY,
    DEFAULT_BOARD,
    BoardOption,
    ForceOption,
    KeyOption,
    check_new_file,
    open_board,
)


def token_create(
    team: Annotated[str, typer.Argument(help="The team, or the teacher's name.")],
    where: BoardOption = DEFAULT_BOARD,
    admin: Annotated[bool, typer.Option("--admin", help="A teacher's token.")] = False,
    key: KeyOption = None,
    as_json: AsJson = False,
) -> None:
    """Create a token; it is shown once and stored only as a hash.

    Example: tilewise compete token create owls --board board.sqlite
    """
    from tilewise_arena.board.tokens import create_token

    with open_board(where, key, create=True) as board:
        before = [row["id"] for row in board.teams() if row["team"] == team and row["revoked_at"] is None]
        token = create_token(board, team, admin, BY)
    answer(as_json, {"team": team, "token": token}, token)
    if not as_json:
        print(f"This is {team}'s token; it is shown only once. Submit with --token or TILEWISE_TOKEN.", file=sys.stderr)
    if before and not as_json:
        names = ", ".join(before)
        print(f"{team} had a token before ({names}); it still works until `compete token revoke`.", file=sys.stderr)


def token_revoke(
    identifier: Annotated[str, typer.Argument(help="The token's public name, or the token.")],
    where: BoardOption = DEFAULT_BOARD,
    key: KeyOption = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a token.

    Example: tilewise compete token revoke 3f9a12bc
    """
    from tilewise_arena.board.tokens import revoke_token

    with open_board(where, key) as board:
        revoke_token(board, identifier, BY)
    answer(as_json, {"revoked": True}, "revoked")


def token_list(where: BoardOption = DEFAULT_BOARD, as_json: AsJson = False) -> None:
    """List tokens by name.

    Example: tilewise compete token list
    """
    with open_board(where) as board:
        rows = board.teams()
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        revocation = f", revoked {row['revoked_at'][:16]}" if row["revoked_at"] else ""
        print(f"{row['id']}  {row['team']}  {row['role']}  since {row['created_at'][:16]}{revocation}")


def event(
    name: Annotated[str, typer.Argument(help="The event.")],
    state: Annotated[str, one_of("open", "close", declare=typer.Argument)],
    where: BoardOption = DEFAULT_BOARD,
    key: KeyOption = None,
    as_json: AsJson = False,
) -> None:
    """Open or close an event for new entries.

    Example: tilewise compete event MLP_SPRINT close
    """
    if state not in ("open", "close"):
        raise ConfigurationError("an event can be opened or closed: say open or close")
    with open_board(where, key) as board, board.write() as transaction:
        transaction.set_open(name, state == "open", BY)
    is_open = state == "open"
    answer(as_json, {"event": name, "open": is_open}, f"{name} is {'open' if is_open else 'closed'}")


def disqualify(
    number: Annotated[int, typer.Argument(help="The entry.")],
    reason: Annotated[str, typer.Argument(help="Why; shown on the board.")],
    where: BoardOption = DEFAULT_BOARD,
    key: KeyOption = None,
    as_json: AsJson = False,
) -> None:
    """Take an entry out of the ranking, with a reason.

    Example: tilewise compete disqualify 17 "two members in two teams"
    """
    with open_board(where, key) as board, board.write() as transaction:
        transaction.disqualify(number, reason, BY)
    answer(as_json, {"entry": number, "disqualified": reason}, f"entry {number} is disqualified")


def reinstate(
    number: Annotated[int, typer.Argument(help="The entry.")],
    where: BoardOption = DEFAULT_BOARD,
    key: KeyOption = None,
    as_json: AsJson = False,
) -> None:
    """Lift a disqualification; the entry is measured again.

    Example: tilewise compete reinstate 17
    """
    with open_board(where, key) as board, board.write() as transaction:
        transaction.reinstate(number, BY)
    answer(as_json, {"entry": number, "reinstated": True}, f"entry {number} is back and waits for a run")


def roster(
    path: Annotated[
        Path, typer.Argument(help="The class as CSV: a column `name`, and `team` where they work together.")
    ],
    out: Annotated[Path, output_file(help="The file for the new tokens; they are shown nowhere else.")],
    where: BoardOption = DEFAULT_BOARD,
    key: KeyOption = None,
    as_json: AsJson = False,
) -> None:
    """Create a token for every team of a class that has none yet, and write which team gets which token.

    Example: tilewise compete roster class.csv --out tokens.csv --board board.sqlite
    """
    from tilewise._atomic import write_atomic
    from tilewise_arena.board.grades import make_tokens, read_roster, tokens_csv

    students = read_roster(path)
    if out.exists():
        raise ConfigurationError(f"{out} exists and may hold tokens that are shown nowhere else; name another file")
    write_atomic(out, "", private=True)  # a place that cannot be written to is found before a token is made
    with open_board(where, key, create=True) as board:
        tokens = make_tokens(board, students, BY)
    write_atomic(out, tokens_csv(students, tokens), private=True)
    summary = f"{pluralize(len(tokens), 'new token')} for {pluralize(len(students), 'student')} in {out}"
    answer(as_json, {"tokens": len(tokens), "file": str(out)}, summary)


def grades(
    where: BoardOption = DEFAULT_BOARD,
    out: Annotated[Path | None, output_file(help="A file instead of the screen.")] = None,
    roster: Annotated[Path | None, typer.Option(help="The class as CSV: one line for each student.")] = None,
    force: ForceOption = False,
) -> None:
    """Write the best verified entry of every team in every event as CSV; with a roster, one line per student.

    Example: tilewise compete grades --roster class.csv --out grades.csv
    """
    from tilewise._atomic import write_atomic
    from tilewise_arena.board.grades import class_grades_csv, grades_csv, read_roster

    if out is not None:
        check_new_file(out, force)
    students = None if roster is None else read_roster(roster)
    with open_board(where) as board:
        text = grades_csv(board) if students is None else class_grades_csv(board, students)
    if out is None:
        print(text, end="")
    else:
        write_atomic(out, text)
        print(f"{text.count(chr(10)) - 1} lines of grades in {out}")


def backup(
    path: Annotated[Path, typer.Argument(help="The file to write.")],
    where: BoardOption = DEFAULT_BOARD,
    key: KeyOption = None,
    force: ForceOption = False,
    as_json: AsJson = False,
) -> None:
    """Write the whole board, its key included, to one file that only you can read.

    Example: tilewise compete backup monday.jsonl --board board.sqlite
    """
    from tilewise_arena.board.backup import back_up

    check_new_file(path, force)
    with open_board(where, key) as board:
        lines = back_up(board, path)
    answer(as_json, {"lines": lines, "file": str(path)}, f"{lines} lines in {path}")


def restore(
    path: Annotated[Path, typer.Argument(help="A backup.")],
    where: BoardOption = DEFAULT_BOARD,
    key: KeyOption = None,
    new_key: Annotated[
        bool, typer.Option("--new-key", help="Seal the board with a new key, if the old one is lost.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Create a board from a backup, which is verified before anything is written.

    Example: tilewise compete restore monday.jsonl --board new.sqlite
    """
    from tilewise_arena.board.backup import restore as run

    links = run(path, where, key, new_key)
    answer(as_json, {"links": links, "board": where}, f"{pluralize(links, 'link')} in {where}")


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
