"""Tokens: how a team, or the teacher, says who they are. The board keeps hashes, so a copy of it opens nothing."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

from sqlalchemy import select

from tilewise.bench.board import schema
from tilewise.bench.board.store import Board
from tilewise.bench.submission import check_team

_PREFIX = "tw"


@dataclass(frozen=True)
class Holder:
    """Whom a token belongs to."""

    id: str
    team: str
    role: str  # "team" or "admin"

    @property
    def is_admin(self) -> bool:
        return self.role == "admin"


def new_token() -> tuple[str, str]:
    """A token and its public name."""
    identifier = secrets.token_hex(4)
    return identifier, f"{_PREFIX}_{identifier}_{secrets.token_urlsafe(32)}"


def create_token(board: Board, team: str, admin: bool = False, by: str = "") -> str:
    """A new token, shown once and never stored: 256 random bits behind a short public name."""
    check_team(team)
    identifier, token = new_token()
    with board.write() as transaction:
        transaction.add_token(identifier, hash_token(token), team, "admin" if admin else "team", by)
    return token


def revoke_token(board: Board, identifier: str, by: str = "") -> None:
    """Make a token useless, by its public name (the part between the first two underscores) or by itself."""
    parts = identifier.split("_")
    with board.write() as transaction:
        transaction.revoke_token(parts[1] if len(parts) > 2 else identifier, by)


def holder_of(board: Board, token: str | None) -> Holder | None:
    """Whose token this is; None for an unknown or revoked one."""
    if not token or len(token) > 200:
        return None
    table = schema.tokens
    with board.read() as connection:
        found = connection.execute(select(table).where(table.c.hash == hash_token(token))).first()
    if found is None or found.revoked_at is not None:
        return None
    return Holder(str(found.id), str(found.team), str(found.role))


def hash_token(token: str) -> str:
    """What is kept of a token."""
    return hashlib.sha256(token.encode("utf-8", errors="surrogatepass")).hexdigest()
