"""A store in each of its homes, for tests: a file, and a database of its own in a PostgreSQL of the test's."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.bench.postgres import Cluster, find_binaries, running_cluster

HOMES = ("file", "postgresql")


def why_no_postgres() -> str | None:
    """What is missing for a store in PostgreSQL; None where nothing is."""
    for name in ("sqlalchemy", "psycopg"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed: pip install tilewise-fleet"
    return None if find_binaries() is not None else "PostgreSQL is not installed; `make test-fleet` installs it"


@contextmanager
def shared_cluster() -> Iterator[Cluster]:
    reason = why_no_postgres()
    if reason:
        pytest.skip(reason)
    with running_cluster() as cluster:
        yield cluster


def new_database(cluster: Cluster, name: str) -> str:
    """The URL of an empty database."""
    import psycopg

    with psycopg.connect(cluster.url, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"'.encode())
    return cluster.url.replace("/postgres?", f"/{name}?")


def file_store(folder: Path, name: str = "s") -> str:
    return str(folder / f"{name}.sqlite")
