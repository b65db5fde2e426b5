"""Where measurements are kept, and how files are written: beside, flushed, renamed, so whole or absent."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from tilewise.errors import FileFormatError


def cache_directory() -> Path:
    """TILEWISE_CACHE, else tilewise under XDG_CACHE_HOME or ~/.cache."""
    override = os.environ.get("TILEWISE_CACHE")
    if override:
        return Path(override).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tilewise"


def write_whole(path: str | Path, text: str) -> Path:
    """Write a text file so that nobody ever sees half of it."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise FileFormatError(f"cannot write {target}: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(target)
    except BaseException as error:
        with suppress(OSError):
            Path(name).unlink()
        if isinstance(error, OSError):
            raise FileFormatError(f"cannot write {target}: {error.strerror}") from None
        raise
    return target
