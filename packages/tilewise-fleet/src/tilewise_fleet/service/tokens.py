"""Tokens of a store: who may add measurements to it, and of which machine. The store keeps hashes only."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tilewise.errors import ConfigurationError
from tilewise.store.store import Store
from tilewise.tune.measure.collect import KINDS
from tilewise.web.tokens import hash_token, new_token, public_name

ANY = "*"


@dataclass(frozen=True)
class Holder:
    """Whom a token belongs to: a machine, as `store info` names it, or any."""

    id: str
    machine: str

    def may_write(self, part: str) -> bool:
        return self.machine in (ANY, part)


def create_token(store: Store, machine: str = ANY) -> str:
    """A new token, shown once and never stored."""
    named = machine == ANY or machine.partition(" ")[0] in KINDS
    if not named or len(machine) > 160 or not machine.isprintable():
        raise ConfigurationError(
            "A token is for a machine as `tilewise store info` names it (cpu or triton, then its name), or for any."
        )
    identifier, token = new_token()
    values = {"id": identifier, "hash": hash_token(token), "name": machine, "created": time.time()}
    query = "INSERT INTO token (id, hash, name, created) VALUES (:id, :hash, :name, :created)"
    store.database.write(lambda transaction: transaction.execute(query, values))
    return token


def revoke_token(store: Store, identifier: str) -> None:
    """Make a token useless, by its public name (the part between the first two underscores) or by itself."""
    values = {"id": public_name(identifier), "now": time.time()}
    query = "UPDATE token SET revoked = :now WHERE id = :id AND revoked IS NULL"
    if not store.database.write(lambda transaction: transaction.execute(query, values)):
        raise ConfigurationError(f"There is no token {values['id']!r} to revoke.")


def holder_of(store: Store, token: str) -> Holder | None:
    """Whose token this is; None for an unknown or revoked one."""
    if not token or len(token) > 200:
        return None
    found = store.database.read(
        "SELECT id, name FROM token WHERE hash = :hash AND revoked IS NULL", {"hash": hash_token(token)}
    )
    return Holder(str(found[0][0]), str(found[0][1])) if found else None
