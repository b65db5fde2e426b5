"""Unpacks an archive of kernel files without trusting it.

Accepted: plain tar archives whose members are folders or regular files, under relative paths without ``..``, at most
as large as the archive itself. Kernel files land in ``npz/tile/xla/<split>``; a link, a device, a sparse file or a path
that leaves the folder refuses the whole archive before a single file is in place.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tilewise._files import open_input
from tilewise.errors import FileFormatError, TilewiseError, UnavailableError

_MEMBER = re.compile(r"(?:npz/)?(?:tile/)?(?:xla/)?(?P<split>train|valid|test)/(?P<name>[A-Za-z0-9_.+=-]{1,200}\.npz)")
_MAX_MEMBERS = 1_000_000
_MAX_FILE_BYTES = 1 << 30
_MAX_ARCHIVE_BYTES = 1 << 40


@dataclass(frozen=True)
class Unpacked:
    """How many kernel files of each split were put in place, and how many other files the archive held."""

    kernels: dict[str, int]
    ignored: int


def unpack_tar(archive: Path, data_root: Path) -> Unpacked:
    """Put the kernel files of `archive` under ``data_root/npz/tile/xla``."""
    place = data_root / "npz" / "tile" / "xla"
    unfinished = place / f".{archive.name}.unfinished"
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        try:
            result = _extract(archive, unfinished)
            _put_in_place(unfinished, place)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise UnavailableError(f"{archive} cannot be unpacked under {place} ({error.strerror or error}).") from error
    return result


def _extract(archive: Path, folder: Path) -> Unpacked:
    kernels: dict[str, int] = {}
    ignored = 0
    with _opened(archive) as tar:
        for member in _checked(tar, archive):
            match = _MEMBER.fullmatch(PurePosixPath(member.name).as_posix().removeprefix("./"))
            if match is None:
                ignored += 1
                continue
            source = tar.extractfile(member)
            if source is None:
                raise FileFormatError(f"{archive}: {member.name[:200]!r} cannot be read.")
            target = folder / match["split"] / match["name"]
            target.parent.mkdir(exist_ok=True)
            with target.open("wb") as stream:
                shutil.copyfileobj(source, stream, 1 << 20)
            if target.stat().st_size != member.size:
                raise FileFormatError(f"{archive} is cut short; fetch it again.")
            kernels[match["split"]] = kernels.get(match["split"], 0) + 1
    if not kernels:
        raise FileFormatError(f"{archive} holds no kernel files such as npz/tile/xla/train/<name>.npz.")
    return Unpacked(kernels, ignored)


@contextlib.contextmanager
def _opened(archive: Path) -> Iterator[tarfile.TarFile]:
    try:
        with open_input(archive, _MAX_ARCHIVE_BYTES) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            yield tar
    except TilewiseError:
        raise
    except (tarfile.TarError, EOFError, ValueError, OverflowError, UnicodeError, RecursionError) as error:
        raise FileFormatError(f"{archive} is not a readable tar archive ({type(error).__name__}).") from error


def _checked(tar: tarfile.TarFile, archive: Path) -> Iterator[tarfile.TarInfo]:
    """The regular files of `tar`; anything a kernel archive has no business holding raises."""
    total, limit = 0, archive.stat().st_size
    for number, member in enumerate(tar):
        path = PurePosixPath(member.name)
        shown = f"{archive}: {member.name[:200]!r}"
        if number >= _MAX_MEMBERS:
            raise FileFormatError(f"{archive} holds more than {_MAX_MEMBERS} members.")
        if path.is_absolute() or ".." in path.parts or "\\" in member.name or "\0" in member.name:
            raise FileFormatError(f"{shown} would be written outside the folder; the archive is not accepted.")
        if member.isdir():
            continue
        if not member.isreg() or member.issparse():
            raise FileFormatError(f"{shown} is a link or a special file; the archive is not accepted.")
        total += member.size
        if member.size < 0 or member.size > _MAX_FILE_BYTES or total > limit:
            raise FileFormatError(f"{shown} claims {member.size} bytes, more than is there or allowed.")
        yield member
    with archive.open("rb") as stream:  # tarfile takes a damaged or missing header for the end
        stream.seek(tar.offset)
        if stream.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise FileFormatError(f"{archive} is cut short or damaged after {tar.offset} bytes; fetch it again.")


def _put_in_place(unfinished: Path, place: Path) -> None:
    """Move whole splits by one rename where the split is new, else file by file."""
    for split in sorted(path for path in unfinished.iterdir() if path.is_dir()):
        target = place / split.name
        if not target.exists():
            split.rename(target)
            continue
        for file in sorted(split.iterdir()):
            file.replace(target / file.name)
