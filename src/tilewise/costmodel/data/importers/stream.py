"""Reads logs of any length in little memory: plain, gzipped or in an archive (zip, tar), by line or by JSON element.

Nothing is unpacked to disk, and at most one line or one element is in memory at a time. The lengths of lines, elements
and unpacked files are limited.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import json
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast

from tilewise._files import open_input
from tilewise.errors import FileFormatError, TilewiseError

MAX_FILE_BYTES = 1 << 40
MAX_UNPACKED_BYTES = 1 << 37
MAX_LINE_BYTES = 4 << 20
MAX_ELEMENT_CHARS = 4 << 20
MAX_MEMBERS = 5000
MAX_ARCHIVE_BYTES = 1 << 28  # of a tar archive, unpacked: it is read from its start to its end
_CHUNK_BYTES = 1 << 18
_TAR_MAGIC_END = 262  # a tar header has "ustar" before this byte
# The pattern matches the empty text too, so that a match never is None.
_WHITESPACE = cast("Callable[[str, int], re.Match[str]]", re.compile(r"[ \t\r\n]*").match)
_AFTER_VALUE = tuple(" \t\r\n,:]}")
_ARCHIVE_ERRORS = (zipfile.BadZipFile, tarfile.TarError, zlib.error)
_DAMAGE_ERRORS = (*_ARCHIVE_ERRORS, EOFError, OSError, RuntimeError, NotImplementedError)


class Readable(Protocol):
    """The methods of a binary stream that the readers use."""

    def read(self, size: int = -1, /) -> bytes: ...

    def readline(self, size: int = -1, /) -> bytes: ...


@dataclass(frozen=True)
class Source:
    """The stream of one log, its name for messages, and the path of its file."""

    name: str
    stream: Readable
    path: Path | None = None


def open_sources(path: Path) -> Iterator[Source]:
    """Yield the logs in the file `path`: the file itself, unpacked if gzipped, or each member of an archive."""
    try:
        with open_input(path, MAX_FILE_BYTES) as stream:
            # Recognize gzip, zip and tar by their magic bytes, not by the name of the file.
            start = stream.read(_TAR_MAGIC_END)
            stream.seek(0)
            if start[:2] == b"\x1f\x8b":
                with gzip.GzipFile(fileobj=stream) as unpacked:
                    is_tar = _is_tar(_LimitedStream(unpacked, path).read(_TAR_MAGIC_END))
                    unpacked.seek(0)
                    if is_tar:
                        yield from _tar_members(unpacked, path)
                    else:
                        yield Source(path.name, _LimitedStream(unpacked, path), path)
            elif _is_tar(start):
                yield from _tar_members(stream, path)
            elif start[:4] == b"PK\x03\x04":
                yield from _open_members(stream, path)
            else:
                yield Source(path.name, stream, path)
    except TilewiseError:  # some subclasses are RuntimeErrors too
        raise
    except _DAMAGE_ERRORS as error:
        raise FileFormatError(f"{path} is damaged ({type(error).__name__}).") from error


def _open_members(stream: IO[bytes], path: Path) -> Iterator[Source]:
    """Yield the files of a zip archive as sources."""
    with zipfile.ZipFile(stream) as archive:
        # A zip archive also lists its directories as members.
        infos = [info for info in archive.infolist() if not info.is_dir()]
        if len(infos) > MAX_MEMBERS:
            raise FileFormatError(f"{path} contains {len(infos)} files; at most {MAX_MEMBERS} are read.")
        for info in infos:
            with archive.open(info) as member:
                yield Source(f"{path.name}/{info.filename}", _LimitedStream(member, path))


def _is_tar(start: bytes) -> bool:
    return start[_TAR_MAGIC_END - 5 :] == b"ustar"


def _tar_members(stream: Readable, path: Path) -> Iterator[Source]:
    """Yield the files in a tar archive as they are read, without seeking and without writing anything."""
    limited: Any = _LimitedStream(stream, path, MAX_ARCHIVE_BYTES)
    with tarfile.open(fileobj=limited, mode="r|") as archive:
        for number, info in enumerate(archive, start=1):
            if number > MAX_MEMBERS:
                raise FileFormatError(f"{path} contains more than {MAX_MEMBERS} files; at most that many are read.")
            member = archive.extractfile(info) if info.isfile() else None
            if member is not None:
                yield Source(f"{path.name}/{info.name}", _LimitedStream(member, path))


class _LimitedStream:
    """Stream that raises `FileFormatError` if compressed data is damaged or unpacks to an implausible size."""

    def __init__(self, stream: Readable, path: Path, limit: int = MAX_UNPACKED_BYTES) -> None:
        self._stream, self._path, self._limit, self._remaining = stream, path, limit, limit

    def read(self, size: int = -1) -> bytes:
        return self._unpack(self._stream.read, size)

    def readline(self, size: int = -1) -> bytes:
        return self._unpack(self._stream.readline, size)

    def _unpack(self, method: Callable[[int], bytes], size: int) -> bytes:
        """Call `method(size)` of the compressed stream; convert its exceptions and check the size."""
        try:
            # gzip and zip check their sums only while they unpack.
            chunk = method(size)
        except _DAMAGE_ERRORS as error:
            raise FileFormatError(f"{self._path} is damaged or cut short ({type(error).__name__}).") from error
        self._remaining -= len(chunk)
        if self._remaining < 0:
            raise FileFormatError(f"{self._path} unpacks to more than {self._limit >> 20} MiB.")
        return chunk


def lines(source: Source) -> Iterator[str]:
    """Yield stripped lines of text; invalid UTF-8 is replaced, so that a bad byte costs one line only."""
    while line := source.stream.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise FileFormatError(f"{source.name} has a line of more than {MAX_LINE_BYTES >> 20} MiB.")
        yield line.decode("utf-8", "replace").strip()


def csv_rows(text: Iterable[str], skip: Callable[[str], None]) -> Iterator[list[str]]:
    """Yield the rows of CSV text; at one that cannot be parsed, call `skip` with the reason and stop."""
    try:
        yield from csv.reader(text)
    except csv.Error as error:
        skip(f"not CSV from here on: {error}")


def parse_line(line: str) -> Any:
    """Parse one line as JSON; return None if it is not JSON."""
    # A malformed line is common in logs of crashed runs and must not end the import.
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(line)
    return None


class JsonWalker:
    """Traverses a JSON document without loading it: the members of an object or the elements of an array, one by one.

    >>> import io
    >>> source = Source("x", io.BytesIO(b'{"a": 1, "b": [1, 2]}'))
    >>> walker = JsonWalker(source)
    >>> [(key, list(walker.elements()) if key == "b" else walker.value()) for key in walker.members()]
    [('a', 1), ('b', [1, 2])]
    """

    def __init__(self, source: Source) -> None:
        """Begin at the first character of a JSON document."""
        self._source = source
        self._decode = json.JSONDecoder().raw_decode
        self._decode_chunk = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._text, self._position, self._at_end = "", 0, False

    def next_char(self) -> str:
        """Return the next character that is not white space without consuming it; empty at the end."""
        while True:
            self._position = _WHITESPACE(self._text, self._position).end()
            if self._position < len(self._text) or not self._read_more():
                return self._text[self._position : self._position + 1]

    def members(self) -> Iterator[str]:
        """Yield the names of an object's members; the caller consumes each value before it requests the next name."""
        self._expect("{")
        while self.next_char() not in ("}", ""):
            key = self.value()
            if not isinstance(key, str):
                raise self._syntax_error()
            self._expect(":")
            yield key
            if self.next_char() == ",":
                self._position += 1
        self._position += 1

    def elements(self) -> Iterator[Any]:
        """Yield the elements of an array."""
        self._expect("[")
        while self.next_char() not in ("]", ""):
            yield self.value()
            if self.next_char() == ",":
                self._position += 1
        self._position += 1

    def value(self) -> Any:
        """Parse and return the next value, of at most `MAX_ELEMENT_CHARS` characters."""
        self.next_char()
        length = _CHUNK_BYTES
        while True:
            try:
                value, end = self._decode(self._text, self._position)
                # A number at the end of the text may continue in the next chunk: `1` may be the start of `1.5`.
                if self._at_end or self._text[end : end + 1] in _AFTER_VALUE:
                    self._position = end
                    return value
            except RecursionError:
                raise FileFormatError(f"{self._source.name} is nested too deeply.") from None
            except ValueError:
                pass
            # The value may be incomplete: read twice as much and parse it again.
            if self._at_end or length > MAX_ELEMENT_CHARS:
                raise self._syntax_error()
            length *= 2  # doubling bounds the total work of all attempts by a multiple of the final length
            while len(self._text) - self._position < length and self._read_more():
                pass

    def _read_more(self) -> bool:
        """Append the next chunk to the buffer and drop consumed text; return False at the end."""
        if self._at_end:
            return False
        chunk = self._source.stream.read(_CHUNK_BYTES)
        self._at_end = not chunk
        self._text = self._text[self._position :] + self._decode_chunk(chunk, final=self._at_end)
        self._position = 0
        return not self._at_end

    def _expect(self, character: str) -> None:
        """Skip whitespace and consume `character`; raise a syntax error if something else comes."""
        if self.next_char() != character:
            raise self._syntax_error()
        self._position += 1

    def _syntax_error(self) -> FileFormatError:
        return FileFormatError(f"{self._source.name} is not complete JSON, or one of its elements is too long.")
