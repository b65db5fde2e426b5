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
from tilewise_arena.board.chain import row_seal
from tilewise_arena.board.store import Board
from tilewise_arena.board.tokens import Holder


def open_session(board: Board, token: str, seconds: float) -> str:
    """Sign in the holder of a token, given its public name, for `seconds`; return the cookie's content."""
    secret, now = secrets.token_urlsafe(32), time.time()
    with board.write() as transaction:
        connection = transaction.connection
        connection.execute(delete(schema.sessions).where(schema.sessions.c.until < now))
        digest, until = _hash(board, secret), now + seconds
        seal = session_seal(_key(board), digest, token, until)
        connection.execute(insert(schema.sessions).values(hash=digest, token=token, until=until, seal=seal))
    return secret


def session_holder(board: Board, secret: str) -> Holder | None:
    """Return the owner of a session cookie; None if it is unknown, expired, or its token is revoked."""
    session, tokens = schema.sessions, schema.tokens
    is_valid = (
        (session.c.hash == _hash(board, secret)) & (session.c.until > time.time()) & (tokens.c.id == session.c.token)
    )
    columns = (tokens.c.id, tokens.c.team, tokens.c.role, session.c.hash, session.c.until, session.c.seal)
    query = select(*columns).where(is_valid & tokens.c.revoked_at.is_(None))
    with board.read() as connection:
        row = connection.execute(query).first()
    if row is None:
        return None
    seal = session_seal(_key(board), str(row.hash), str(row.id), float(row.until))
    return Holder(str(row.id), str(row.team), str(row.role)) if hmac.compare_digest(seal, str(row.seal)) else None


def session_seal(key: bytes, digest: str, token: str, until: float) -> str:
    """Return the seal of a session, without which it could be prolonged or given to another token."""
    return row_seal(key, "sessions", str(digest), str(token), float(until))


def end_session(board: Board, secret: str) -> None:
    """Sign out: delete the session of a cookie."""
    with board.write() as transaction:
        transaction.connection.execute(delete(schema.sessions).where(schema.sessions.c.hash == _hash(board, secret)))


def _key(board: Board) -> bytes:
    """Return the board's secret key; raise `UnavailableError` if it is missing."""
    if board.key is None:
        raise UnavailableError("this board's key is missing, so nobody can sign in")
    return board.key


def _hash(board: Board, secret: str) -> str:
    content = b"session " + secret.encode("utf-8", errors="surrogatepass")
    return hmac.new(_key(board), content, hashlib.sha256).hexdigest()
