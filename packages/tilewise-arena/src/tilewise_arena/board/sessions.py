"""Sessions of the website: a random cookie, whose hash the board stores until it expires or its token is revoked.

The hash needs the board's key, so write access to the database alone is not enough to create a session.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time

from sqlalchemy import delete, insert, select

from tilewise.errors import UnavailableError
from tilewise_arena.board import schema
from tilewise_arena.board.store import Board
from tilewise_arena.board.tokens import Holder


def open_session(board: Board, token: str, seconds: float) -> str:
    """Sign the holder of the token with this public name in; gives what the cookie holds."""
    secret, now = secrets.token_urlsafe(32), time.time()
    with board.write() as transaction:
        connection = transaction.connection
        connection.execute(delete(schema.sessions).where(schema.sessions.c.until < now))
        connection.execute(insert(schema.sessions).values(hash=_hash(board, secret), token=token, until=now + seconds))
    return secret


def session_holder(board: Board, secret: str) -> Holder | None:
    """Return the owner of a cookie; None if it is unknown or has expired, or its token is revoked."""
    session, tokens = schema.sessions, schema.tokens
    is_valid = (
        (session.c.hash == _hash(board, secret)) & (session.c.until > time.time()) & (tokens.c.id == session.c.token)
    )
    query = select(tokens.c.id, tokens.c.team, tokens.c.role).where(is_valid & tokens.c.revoked_at.is_(None))
    with board.read() as connection:
        found = connection.execute(query).first()
    return None if found is None else Holder(str(found.id), str(found.team), str(found.role))


def end_session(board: Board, secret: str) -> None:
    """Sign out: the cookie opens nothing from now on."""
    with board.write() as transaction:
        transaction.connection.execute(delete(schema.sessions).where(schema.sessions.c.hash == _hash(board, secret)))


def _hash(board: Board, secret: str) -> str:
    if board.key is None:
        raise UnavailableError("this board's key is missing, so nobody can sign in")
    return hmac.new(board.key, b"session " + secret.encode("utf-8", errors="surrogatepass"), hashlib.sha256).hexdigest()
