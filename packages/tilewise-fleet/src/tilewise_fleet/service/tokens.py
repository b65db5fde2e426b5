"""Tokens of a store: who may add measurements to it, and for which machine. The store has only their hashes."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tilewise.errors import ConfigurationError
from tilewise.store.store import Store
from tilewise.tune.measure.collector import KINDS
from tilewise.web.tokens import hash_token, new_token, public_name

ANY_MACHINE = "*"


@dataclass(frozen=True)
class TokenOwner:
    """Public name of a token and the machine (store partition, or `*` for any) that may use it."""

    id: str
    machine: str

    def may_write(self, partition: str) -> bool:
        """Tell whether the token may add measurements to a partition of the store."""
        return self.machine in (ANY_MACHINE, partition)


def create_token(store: Store, machine: str = ANY_MACHINE) -> str:
    """Create a token and return it; the store has only its hash, so it cannot be shown again."""
    known_kind = machine == ANY_MACHINE or machine.partition(" ")[0] in KINDS
    if not known_kind or len(machine) > 160 or not machine.isprintable():
        raise ConfigurationError(
            "A token is for a machine as `tilewise store info` names it (cpu or triton, then its name), or for any."
        )
    identifier, token = new_token()
    values = {"id": identifier, "hash": hash_token(token), "name": machine, "created": time.time()}
    query = "INSERT INTO token (id, hash, name, created) VALUES (:id, :hash, :name, :created)"
    store.database.write(lambda transaction: transaction.execute(query, values))
    return token


def revoke_token(store: Store, identifier: str) -> None:
    """Revoke a token, given itself or its public name (the part between the first two underscores)."""
    values = {"id": public_name(identifier), "now": time.time()}
    query = "UPDATE token SET revoked = :now WHERE id = :id AND revoked IS NULL"
    if not store.database.write(lambda transaction: transaction.execute(query, values)):
        raise ConfigurationError(f"There is no token {values['id']!r} to revoke.")


def find_owner(store: Store, token: str) -> TokenOwner | None:
    """Return the owner of a token; None if it is unknown or revoked."""
    if not token or len(token) > 200:
        return None
    rows = store.database.read(
        "SELECT id, name FROM token WHERE hash = :hash AND revoked IS NULL", {"hash": hash_token(token)}
    )
    return TokenOwner(str(rows[0][0]), str(rows[0][1])) if rows else None
