"""Unpacks an untrusted archive of kernel files.

Accepted are plain tar archives whose members are folders or regular files, under relative paths without ``..``, and
together at most as large as the archive. Kernel files are unpacked to ``npz/tile/xla/<split>``. A link, a device, a
sparse file or a path outside the folder rejects the whole archive before any file is in place.
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
# Limits for untrusted archives, far above the public dataset.
_MAX_MEMBERS = 1_000_000
_MAX_FILE_BYTES = 1 << 30
_MAX_ARCHIVE_BYTES = 1 << 40


@dataclass(frozen=True)
class UnpackReport:
    """Number of kernel files unpacked per split, and of other files in the archive that were ignored."""

    kernels: dict[str, int]
    ignored: int


def unpack_tar(archive: Path, data_root: Path) -> UnpackReport:
    """Unpack the kernel files of `archive` to ``data_root/npz/tile/xla``."""
    folder = data_root / "npz" / "tile" / "xla"
    unfinished = folder / f".{archive.name}.unfinished"
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        try:
            # Extract everything before moving anything: a rejected archive leaves no files.
            result = _extract(archive, unfinished)
            _move_files(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise UnavailableError(f"{archive} cannot be unpacked under {folder} ({error.strerror or error}).") from error
    return result


def _extract(archive: Path, folder: Path) -> UnpackReport:
    """Extract the kernel files to ``folder/<split>`` and count them."""
    kernels: dict[str, int] = {}
    ignored = 0
    with _open_tar(archive) as tar:
        for member in _checked_files(tar, archive):
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
        raise FileFormatError(f"{archive} contains no kernel files such as npz/tile/xla/train/<name>.npz.")
    return UnpackReport(kernels, ignored)


@contextlib.contextmanager
def _open_tar(archive: Path) -> Iterator[tarfile.TarFile]:
    """Open a tar archive; raise `FileFormatError` for any exception that damage causes while it is open."""
    try:
        with open_input(archive, _MAX_ARCHIVE_BYTES) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            yield tar
    except TilewiseError:
        raise
    except (tarfile.TarError, EOFError, ValueError, OverflowError, UnicodeError, RecursionError) as error:
        raise FileFormatError(f"{archive} is not a readable tar archive ({type(error).__name__}).") from error


def _checked_files(tar: tarfile.TarFile, archive: Path) -> Iterator[tarfile.TarInfo]:
    """Yield the regular files of `tar`; raise `FileFormatError` at any member that a kernel archive must not have."""
    total, limit = 0, archive.stat().st_size
    for number, member in enumerate(tar):
        path = PurePosixPath(member.name)
        label = f"{archive}: {member.name[:200]!r}"
        if number >= _MAX_MEMBERS:
            raise FileFormatError(f"{archive} contains more than {_MAX_MEMBERS} members.")
        if path.is_absolute() or ".." in path.parts or "\\" in member.name or "\0" in member.name:
            raise FileFormatError(f"{label} would be written outside the folder; the archive is not accepted.")
        if member.isdir():
            continue
        if not member.isreg() or member.issparse():
            raise FileFormatError(f"{label} is a link or a special file; the archive is not accepted.")
        # The archive is not compressed, so its files cannot be larger than the archive.
        total += member.size
        if member.size < 0 or member.size > _MAX_FILE_BYTES or total > limit:
            raise FileFormatError(f"{label} claims {member.size} bytes, more than the archive has or is allowed.")
        yield member
    # `tarfile` takes a damaged or missing header for the end of the archive; the true end is a block of zeros.
    with archive.open("rb") as stream:
        stream.seek(tar.offset)
        if stream.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise FileFormatError(f"{archive} is cut short or damaged after {tar.offset} bytes; fetch it again.")


def _move_files(unfinished: Path, folder: Path) -> None:
    """Move each split to `folder`: by one rename if it is new, otherwise file by file."""
    for split in sorted(path for path in unfinished.iterdir() if path.is_dir()):
        target = folder / split.name
        if not target.exists():
            split.rename(target)
            continue
        for file in sorted(split.iterdir()):
            file.replace(target / file.name)
