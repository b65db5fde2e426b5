"""Tokens: how a team, or the teacher, says who they are. The board keeps hashes, so a copy of it opens nothing."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select

from tilewise.bench.submission import check_team
from tilewise.web.tokens import hash_token, new_token, public_name
from tilewise_arena.board import schema
from tilewise_arena.board.store import Board


@dataclass(frozen=True)
class Holder:
    """The team or teacher that a token belongs to."""

    id: str
    team: str
    role: str  # "team" or "admin"

    @property
    def is_admin(self) -> bool:
        return self.role == "admin"


def create_token(board: Board, team: str, admin: bool = False, by: str = "") -> str:
    """Create a token and return it; the board stores only its hash, so it cannot be shown again."""
    check_team(team)
    identifier, token = new_token()
    with board.write() as transaction:
        transaction.add_token(identifier, hash_token(token), team, "admin" if admin else "team", by)
    return token


def revoke_token(board: Board, identifier: str, by: str = "") -> None:
    """Revoke a token, named by itself or by its public name (the part between the first two underscores)."""
    with board.write() as transaction:
        transaction.revoke_token(public_name(identifier), by)


def holder_of(board: Board, token: str | None) -> Holder | None:
    """Return the owner of a token; None if it is unknown or revoked."""
    if not token or len(token) > 200:
        return None
    table = schema.tokens
    with board.read() as connection:
        row = connection.execute(select(table).where(table.c.hash == hash_token(token))).first()
    if row is None or row.revoked_at is not None:
        return None
    return Holder(str(row.id), str(row.team), str(row.role))
