"""Files that appear whole or not at all: write beside the target, flush to the disk, rename.

A killed process leaves at most a hidden file ending in ``.part`` beside the target, never half of the target itself.
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
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A binary stream whose content becomes the file `path` when the block ends without an error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise UnavailableError(f"{path} cannot be written ({error.strerror or error}).") from error
    try:
        with os.fdopen(descriptor, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).chmod(0o666 & ~_umask())
        Path(name).replace(path)
    except OSError as error:
        raise UnavailableError(f"{path} cannot be written ({error.strerror or error}).") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()


def write_whole(path: Path, content: bytes | str) -> None:
    """Write `content` (text as UTF-8) to `path`, whole or not at all."""
    with replacing(path) as stream:
        stream.write(content.encode("utf-8") if isinstance(content, str) else content)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
