"""Atomic writing of files, and locks between processes.

The writer creates a temporary file next to the target, flushes it to the disk and renames it: a killed process leaves
at most a hidden file ending in ``.part``, never a partial target.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tilewise.errors import UnavailableError


@contextlib.contextmanager
def convert_write_errors(path: Path) -> Iterator[None]:
    """Convert system errors raised in the block while writing `path` to an UnavailableError."""
    try:
        yield
    except OSError as error:
        raise UnavailableError(f"{path} cannot be written ({error.strerror or error}).") from error


@contextlib.contextmanager
def atomic_writer(path: Path, private: bool = False) -> Iterator[IO[bytes]]:
    """Open a binary stream whose content becomes the file `path` when the block ends without an error.

    Nobody but its owner can ever read a `private` file.
    """
    with convert_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".part", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            if not private:  # the temporary file is
                Path(name).chmod(0o666 & ~_umask())
            Path(name).replace(path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                Path(name).unlink()


def write_atomic(path: Path, content: bytes | str, private: bool = False) -> None:
    """Write `content` (text as UTF-8) to `path` atomically."""
    with atomic_writer(path, private) as stream:
        stream.write(content.encode("utf-8") if isinstance(content, str) else content)


@contextlib.contextmanager
def file_lock(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, which the system releases even if this process is killed.

    Without `wait`, a lock held by another process raises BlockingIOError.
    """
    with path.open("a") as file:
        try:
            import fcntl
        except ImportError:  # no advisory locks on this system
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


def _umask() -> int:
    """Return the process's umask; reading it requires setting it for a moment."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
