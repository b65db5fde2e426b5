"""Safe reading of files from untrusted sources; `_atomic.py` writes files.

The reader (`open_input`) accepts only regular files up to a size limit, so that a pipe, a device, a loop of links or a
file of a terabyte gives an error in one sentence instead of a process that hangs or runs out of memory. Decompressed
gzip data and JSON are bounded as well.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import re
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from tilewise.errors import FileFormatError, MissingFileError, UnavailableError

MIB = 1 << 20
# A parsed document can take 24 times the memory of its text: `{},` is three bytes and becomes a dict.
MAX_JSON_BYTES = 12 * MIB
_LONG_NUMBER = re.compile(rb"\d{309}")
_MIN_SIZE_FOR_HOLE_CHECK = 64 * MIB  # smaller files cannot exhaust memory
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_input(path: str | os.PathLike[str], limit: int) -> IO[bytes]:
    """Open an untrusted path for reading; it must be a regular file of at most `limit` bytes.

    >>> open_input("/dev/zero", 1 << 20)
    Traceback (most recent call last):
        ...
    tilewise.errors.FileFormatError: /dev/zero is a device, not a file.
    """
    try:
        # Check before opening, because opening a pipe waits for its writer; check again after opening, because the
        # file may have been replaced in between. O_NONBLOCK prevents a hang in that case.
        _check_kind(Path(path).stat(), path)
        descriptor = os.open(
            path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        )
    except FileFormatError:  # is a ValueError, which is handled below
        raise
    except FileNotFoundError:
        raise MissingFileError(f"{path} does not exist.") from None
    except OSError as error:
        raise UnavailableError(f"{path} cannot be read ({error.strerror or error}).") from None
    except ValueError:  # the name has a null byte, or the file system's encoding cannot represent it
        raise UnavailableError(f"{str(path)!r} is not a valid file name.") from None
    try:
        status = os.fstat(descriptor)
        _check_kind(status, path)
        if status.st_size > limit:
            raise FileFormatError(f"{path} has {_amount(status.st_size)}, more than the limit of {_amount(limit)}.")
        if status.st_size > _MIN_SIZE_FOR_HOLE_CHECK and _mostly_holes(descriptor, status.st_size):
            raise FileFormatError(
                f"{path} is a sparse file: its size is {_amount(status.st_size)}, but most of it was never written."
            )
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_input(path: str | os.PathLike[str], limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes."""
    with open_input(path, limit) as stream, convert_read_errors(path):
        # The file may grow, and files in /proc report a size of 0. One without data at the moment gives None.
        content = stream.read(limit + 1) or b""
    if len(content) > limit:
        raise FileFormatError(f"{path} is larger than the limit of {_amount(limit)}.")
    return content


def read_text_input(path: str | os.PathLike[str], limit: int) -> str:
    """Read a UTF-8 file of at most `limit` bytes, with or without a byte order mark."""
    try:
        return read_input(path, limit).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise FileFormatError(f"{path} is not UTF-8 text.") from None


def read_json_input(path: str | os.PathLike[str], limit: int = MAX_JSON_BYTES) -> Any:
    """Read an untrusted JSON file."""
    return parse_json(read_input(path, limit), path, limit)


def parse_json(text: str | bytes, where: object, limit: int = MAX_JSON_BYTES) -> Any:
    """Parse an untrusted JSON document; `where` names it in error messages."""
    if len(text) > limit:
        raise FileFormatError(f"{where} contains more JSON than the limit of {_amount(limit)}.")
    # Python's integers have no limit: float() of a longer one would raise OverflowError later.
    if _LONG_NUMBER.search(text if isinstance(text, bytes) else text.encode("utf-8", "replace")):
        raise FileFormatError(f"{where} is not JSON (a number in it has more than 308 digits).")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, not UTF-8, or a number with 5,000 digits
        raise FileFormatError(f"{where} is not JSON ({_json_reason(error)}).") from None


def gunzip(content: bytes, where: object, limit: int) -> bytes:
    """Decompress gzip data to at most `limit` bytes."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
            decompressed = stream.read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise FileFormatError(f"{where} is not a complete gzip file ({type(error).__name__}).") from None
    if len(decompressed) > limit:
        raise FileFormatError(f"{where} decompresses to more than the limit of {_amount(limit)}.")
    return decompressed


@contextlib.contextmanager
def convert_read_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert system errors raised in the block while reading `path` to an UnavailableError."""
    try:
        yield
    except MemoryError:
        raise UnavailableError(f"{path} does not fit into this machine's memory.") from None
    except OSError as error:
        raise UnavailableError(f"{path} cannot be read ({error.strerror or error}).") from None


def _check_kind(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise FileFormatError(f"{path} is {_KINDS.get(stat.S_IFMT(status.st_mode), 'something else')}, not a file.")


def _mostly_holes(descriptor: int, size: int) -> bool:
    """Tell whether less than a sixteenth of a file occupies disk space; False without support for sparse files."""
    if not hasattr(os, "SEEK_DATA"):
        return False
    position = data_bytes = 0
    with contextlib.suppress(OSError):  # ENXIO: no data up to the end
        while position < size and data_bytes * 16 < size:
            start = os.lseek(descriptor, position, os.SEEK_DATA)
            position = os.lseek(descriptor, start, os.SEEK_HOLE)
            data_bytes += position - start
    os.lseek(descriptor, 0, os.SEEK_SET)
    return data_bytes * 16 < size


def _amount(count: int) -> str:
    return f"{count} bytes" if count < MIB else f"{count / MIB:.0f} MiB"


def _json_reason(error: Exception) -> str:
    """Say in a few words why a JSON text could not be parsed, for the end of an error message."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at line {error.lineno}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return "it is not text, or a number in it is too long"
