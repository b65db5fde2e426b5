"""Access tokens: 256 random bits behind a short public name. Services store hashes: a copied database opens nothing."""

from __future__ import annotations

import hashlib
import secrets

_PREFIX = "tw"


def new_token() -> tuple[str, str]:
    """Return the public name of a new token, and the token itself: `tw_NAME_SECRET`."""
    identifier = secrets.token_hex(4)
    return identifier, f"{_PREFIX}_{identifier}_{secrets.token_urlsafe(32)}"


def public_name(token: str) -> str:
    """Return the public name of a token; a public name is returned unchanged."""
    fields = token.split("_", 2)
    return fields[1] if len(fields) == 3 and fields[0] == _PREFIX else token


def hash_token(token: str) -> str:
    """Return the hash under which a token is stored."""
    return hashlib.sha256(token.encode("utf-8", errors="surrogatepass")).hexdigest()
