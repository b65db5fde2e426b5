"""A PostgreSQL of the test's own: a cluster in a temporary folder, on a socket, started and stopped here."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def find_binaries() -> Path | None:
    """Debian keeps PostgreSQL's programs out of the path, by version."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if programs:
        return programs[-1].parent
    program = shutil.which("initdb")
    return Path(program).parent if program else None


@dataclass(frozen=True)
class Cluster:
    """A running database: its URL, and how to run one of its programs."""

    url: str
    control: Callable[..., None]

    def crash(self) -> None:
        """End it without a word to anybody, as a power cut would, and start it again."""
        self.control("-m", "immediate", "stop")
        self.control("-w", "start")


@contextmanager
def running_postgres() -> Iterator[str]:
    """The URL of an empty database that lives as long as the block."""
    with running_cluster() as cluster:
        yield cluster.url


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """An empty database that lives as long as the block."""
    programs = find_binaries()
    assert programs is not None
    with tempfile.TemporaryDirectory(prefix="tilewise-pg-") as folder:
        owner = "postgres" if os.getuid() == 0 else ""
        if owner:
            shutil.chown(folder, owner)
            Path(folder).chmod(0o755)

        def run(*words: str) -> None:
            who: dict[str, Any] = {"user": owner, "group": owner, "extra_groups": []} if owner else {}
            subprocess.run(words, check=True, capture_output=True, cwd=folder, **who)

        data = f"{folder}/data"
        run(str(programs / "initdb"), "-D", data, "-A", "trust", "-U", "board", "--no-sync")
        options = f"-c listen_addresses='' -k {folder} -c synchronous_commit=on -c fsync=on -c max_connections=200"

        def control(*words: str) -> None:
            run(str(programs / "pg_ctl"), "-D", data, "-o", options, "-l", f"{folder}/log", "-t", "600", *words)

        control("-w", "start")
        try:
            yield Cluster(f"postgresql://board@/postgres?host={folder}", control)
        finally:
            control("-m", "immediate", "stop")
