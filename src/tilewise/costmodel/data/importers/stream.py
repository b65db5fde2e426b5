"""Reads logs of any length in little memory: plain, gzipped or inside a zip archive, by line or by JSON element.

Nothing is unpacked to disk and no more than one line or one element is held at a time; both are bounded, and so is what
a compressed file may unfold to.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast

from tilewise._files import open_input
from tilewise.errors import FileFormatError, TilewiseError

MAX_FILE_BYTES = 1 << 40
MAX_UNFOLDED_BYTES = 1 << 37
MAX_LINE_BYTES = 4 << 20
MAX_ELEMENT_CHARS = 4 << 20
MAX_MEMBERS = 1000
_CHUNK = 1 << 18
_SPACE = cast("Callable[[str, int], re.Match[str]]", re.compile(r"[ \t\r\n]*").match)  # matches anything
_AFTER_VALUE = tuple(" \t\r\n,:]}")
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, NotImplementedError)


class Readable(Protocol):
    """As much of a stream as is needed here."""

    def read(self, size: int = -1, /) -> bytes: ...

    def readline(self, size: int = -1, /) -> bytes: ...


@dataclass(frozen=True)
class Source:
    """One text, and the name to call it by."""

    name: str
    stream: Readable


def open_sources(path: Path) -> Iterator[Source]:
    """The texts in the file `path`: itself, unfolded where it is gzipped, or every member of a zip archive."""
    try:
        with open_input(path, MAX_FILE_BYTES) as stream:
            start = stream.read(4)
            stream.seek(0)
            if start[:2] == b"\x1f\x8b":
                with gzip.GzipFile(fileobj=stream) as unfolded:
                    yield Source(path.name, _Bounded(unfolded, path))
            elif start == b"PK\x03\x04":
                yield from _members(stream, path)
            else:
                yield Source(path.name, stream)
    except TilewiseError:  # some are RuntimeErrors too
        raise
    except _DAMAGE as error:
        raise FileFormatError(f"{path} is damaged ({type(error).__name__}).") from error


def _members(stream: IO[bytes], path: Path) -> Iterator[Source]:
    with zipfile.ZipFile(stream) as archive:
        infos = [info for info in archive.infolist() if not info.is_dir()]
        if len(infos) > MAX_MEMBERS:
            raise FileFormatError(f"{path} holds {len(infos)} files; at most {MAX_MEMBERS} are read.")
        for info in infos:
            with archive.open(info) as member:
                yield Source(f"{path.name}/{info.filename}", _Bounded(member, path))


class _Bounded:
    """A stream that ends with a sentence once it has given more than any log needs."""

    def __init__(self, stream: Readable, path: Path) -> None:
        self._stream, self._path, self._left = stream, path, MAX_UNFOLDED_BYTES

    def read(self, size: int = -1) -> bytes:
        return self._count(self._stream.read(size))

    def readline(self, size: int = -1) -> bytes:
        return self._count(self._stream.readline(size))

    def _count(self, piece: bytes) -> bytes:
        self._left -= len(piece)
        if self._left < 0:
            raise FileFormatError(f"{self._path} unfolds to more than {MAX_UNFOLDED_BYTES >> 30} GiB.")
        return piece


def lines(source: Source) -> Iterator[str]:
    """Lines without their ends; what is no UTF-8 is replaced, so that one bad byte costs one line."""
    while piece := source.stream.readline(MAX_LINE_BYTES + 1):
        if len(piece) > MAX_LINE_BYTES:
            raise FileFormatError(f"{source.name} has a line of more than {MAX_LINE_BYTES >> 20} MiB.")
        yield piece.decode("utf-8", "replace").strip()


def csv_rows(text: Iterable[str], skip: Callable[[str], None]) -> Iterator[list[str]]:
    """The rows of CSV, as far as they can be read."""
    try:
        yield from csv.reader(text)
    except csv.Error as error:
        skip(f"not CSV from here on: {error}")


def parse_line(line: str) -> Any:
    """The JSON value of one line, or None where it is none."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(line)
    return None


class JsonWalker:
    """Walks one JSON document without holding it: the members of an object, or the elements of an array, one at a time.

    >>> import io
    >>> source = Source("x", io.BytesIO(b'{"a": 1, "b": [1, 2]}'))
    >>> walker = JsonWalker(source)
    >>> [(key, list(walker.elements()) if key == "b" else walker.value()) for key in walker.members()]
    [('a', 1), ('b', [1, 2])]
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._decode = json.JSONDecoder().raw_decode
        self._text, self._at, self._ended = "", 0, False
        self._bytes = b""

    def next_char(self) -> str:
        """The next character that is no white space, not taken yet; empty at the end."""
        while True:
            self._at = _SPACE(self._text, self._at).end()
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def members(self) -> Iterator[str]:
        """The names of an object's members; the caller takes the value of each before it asks for the next."""
        self._expect("{")
        while self.next_char() not in ("}", ""):
            key = self.value()
            if not isinstance(key, str):
                raise self._broken()
            self._expect(":")
            yield key
            if self.next_char() == ",":
                self._at += 1
        self._at += 1

    def elements(self) -> Iterator[Any]:
        """The elements of an array."""
        self._expect("[")
        while self.next_char() not in ("]", ""):
            yield self.value()
            if self.next_char() == ",":
                self._at += 1
        self._at += 1

    def value(self) -> Any:
        """The next value whole; it may be a few megabytes long, not more."""
        self.next_char()
        wanted = _CHUNK
        while True:
            try:
                value, end = self._decode(self._text, self._at)
                # A number at the end of what was read may go on: `1` may be the start of `1.5`.
                if self._ended or self._text[end : end + 1] in _AFTER_VALUE:
                    self._at = end
                    return value
            except RecursionError:
                raise FileFormatError(f"{self._source.name} is nested too deeply.") from None
            except ValueError:
                pass
            if self._ended or wanted > MAX_ELEMENT_CHARS:
                raise self._broken()
            wanted *= 2  # doubling keeps the work of trying again in proportion to the length
            while len(self._text) - self._at < wanted and self._more():
                pass

    def _more(self) -> bool:
        if self._ended:
            return False
        piece = self._source.stream.read(_CHUNK)
        self._ended = not piece
        text = (self._bytes + piece).decode("utf-8", "replace") if not piece else self._decoded(piece)
        self._text, self._at = self._text[self._at :] + text, 0
        return not self._ended

    def _decoded(self, piece: bytes) -> str:
        """The text so far; the bytes of a character that is cut off wait for the next piece."""
        whole = self._bytes + piece
        cut = len(whole)
        while cut > len(whole) - 4 and cut > 0 and (whole[cut - 1] & 0xC0) == 0x80:
            cut -= 1
        if cut > 0 and whole[cut - 1] >= 0xC0:
            cut -= 1
        else:
            cut = len(whole)
        self._bytes = whole[cut:]
        return whole[:cut].decode("utf-8", "replace")

    def _expect(self, character: str) -> None:
        if self.next_char() != character:
            raise self._broken()
        self._at += 1

    def _broken(self) -> FileFormatError:
        return FileFormatError(f"{self._source.name} is not whole JSON, or one of its elements is too long.")
