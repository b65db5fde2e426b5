"""The two ends of every file: written whole or not at all, and read without being believed.

Writing goes beside the target, is flushed to the disk and renamed: a killed process leaves at most a hidden file ending
in ``.part``, never half of the target itself. Reading goes through `open_input`: regular files only, no larger than the
reader allows, so that a pipe, a device, a loop of links or a file of a terabyte is one sentence instead of a process
that hangs or takes all memory. What unfolds (gzip, JSON) is bounded as well.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import stat
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from tilewise.errors import FileFormatError, MissingFileError, UnavailableError

MIB = 1 << 20
# A document of n bytes can take 24 n of memory once parsed: `{},` is three bytes and a dict.
MOST_JSON_BYTES = 12 * MIB
_HOLES_MATTER_FROM = 64 * MIB
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


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


def open_input(path: str | os.PathLike[str], limit: int) -> IO[bytes]:
    """A file that somebody names, open for reading: a regular file of at most `limit` bytes, or one sentence.

    >>> open_input("/dev/zero", 1 << 20)
    Traceback (most recent call last):
        ...
    tilewise.errors.FileFormatError: /dev/zero is a device, not a file.
    """
    try:
        # Asked before opening, since opening alone can wait for a pipe's writer or wind a tape; asked again of what was
        # opened, since another may have come in between. Without blocking, so that even that one cannot hang.
        _check_kind(Path(path).stat(), path)
        descriptor = os.open(
            path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        )
    except FileFormatError:  # a ValueError too
        raise
    except FileNotFoundError:
        raise MissingFileError(f"{path} does not exist.") from None
    except OSError as error:
        raise UnavailableError(f"{path} cannot be read ({error.strerror or error}).") from None
    except ValueError:  # a name with a null byte, or one that the file system's encoding does not know
        raise UnavailableError(f"{str(path)!r} is not a name that a file can have.") from None
    try:
        found = os.fstat(descriptor)
        _check_kind(found, path)
        if found.st_size > limit:
            raise FileFormatError(f"{path} has {_amount(found.st_size)}, more than the {_amount(limit)} read here.")
        if found.st_size > _HOLES_MATTER_FROM and _mostly_holes(descriptor, found.st_size):
            raise FileFormatError(
                f"{path} is a file of holes: it claims {_amount(found.st_size)} and holds few of them."
            )
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_input(path: str | os.PathLike[str], limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    with open_input(path, limit) as stream, reading(path):
        content = stream.read(limit + 1)  # a file may grow, and those of /proc say that they are empty
    if len(content) > limit:
        raise FileFormatError(f"{path} has more than the {_amount(limit)} read here.")
    return content


def read_text_input(path: str | os.PathLike[str], limit: int) -> str:
    """The text of a UTF-8 file of at most `limit` bytes, with or without a byte order mark."""
    try:
        return read_input(path, limit).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise FileFormatError(f"{path} is not a text in UTF-8.") from None


def read_json_input(path: str | os.PathLike[str], limit: int = MOST_JSON_BYTES) -> Any:
    """The document of a JSON file."""
    return parse_json(read_input(path, limit), path, limit)


def parse_json(text: str | bytes, where: object, limit: int = MOST_JSON_BYTES) -> Any:
    """A JSON document that nobody vouches for; `where` is what the sentence names."""
    if len(text) > limit:
        raise FileFormatError(f"{where} holds more JSON than the {_amount(limit)} read here.")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8, or a number of 5,000 digits
        raise FileFormatError(f"{where} is not JSON ({_why(error)}).") from None


def gunzip(content: bytes, where: object, limit: int) -> bytes:
    """What a gzip file unfolds to, which must be at most `limit` bytes."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
            unfolded = stream.read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise FileFormatError(f"{where} is not a whole gzip file ({type(error).__name__}).") from None
    if len(unfolded) > limit:
        raise FileFormatError(f"{where} unfolds to more than the {_amount(limit)} read here.")
    return unfolded


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold the exclusive lock of the file `path`, which the system releases even if this process is killed; without
    `wait` a lock that another holds is a BlockingIOError."""
    with path.open("a") as file:
        try:
            import fcntl
        except ImportError:  # no advisory locks on this system
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """What the system says against reading `path` in this block becomes one sentence."""
    try:
        yield
    except MemoryError:
        raise UnavailableError(f"{path} does not fit into the memory of this machine.") from None
    except OSError as error:
        raise UnavailableError(f"{path} cannot be read ({error.strerror or error}).") from None


def _check_kind(found: os.stat_result, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise FileFormatError(f"{path} is {_KINDS.get(stat.S_IFMT(found.st_mode), 'something else')}, not a file.")


def _mostly_holes(descriptor: int, size: int) -> bool:
    """Whether less than a sixteenth of a file is on the disk; a file system without holes says it all is."""
    if not hasattr(os, "SEEK_DATA"):
        return False
    at = held = 0
    with contextlib.suppress(OSError):  # ENXIO: holes up to the end
        while at < size and held * 16 < size:
            start = os.lseek(descriptor, at, os.SEEK_DATA)
            at = os.lseek(descriptor, start, os.SEEK_HOLE)
            held += at - start
    os.lseek(descriptor, 0, os.SEEK_SET)
    return held * 16 < size


def _amount(count: int) -> str:
    return f"{count} bytes" if count < MIB else f"{count / MIB:.0f} MiB"


def _why(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at line {error.lineno}"
    return (
        "it is nested too deeply" if isinstance(error, RecursionError) else "it is not text, or has a number too long"
    )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
