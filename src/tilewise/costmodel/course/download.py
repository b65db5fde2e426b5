"""Downloads the TpuGraphs tile dataset: resumable, verified, and unpacked without trusting the archive.

A file is downloaded as ``<name>.<version>.part``, where the version is a digest of the server's validator. A broken
connection or a killed process continues where it stopped, and starts over only if the file on the server has changed.
The size, and the MD5 if the server provides one, are checked before the file gets its name. File, size and MD5 come
over https; only a server on this machine may use http.

Accepted are plain tar archives whose members are folders or regular files, under relative paths without ``..``, and
together at most as large as the archive. Kernel files are unpacked to ``npz/tile/xla/<split>``. A link, a device, a
sparse file or a path outside the folder rejects the whole archive before any file is in place.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import re
import shutil
import socket
import tarfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from tilewise._atomic import file_lock
from tilewise._files import open_input
from tilewise.errors import ConfigurationError, FileFormatError, TilewiseError, UnavailableError

BASE_URL = "https://storage.googleapis.com/download.tensorflow.org/data/tpu_graphs/v0/"
SPLITS = ("train", "valid", "test")
_BLOCK_BYTES = 1 << 18
_TIMEOUT_S = 60.0
_MAX_WAIT_S = 30.0  # longest pause between two attempts
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_CONNECTION_ERRORS = (OSError, http.client.HTTPException, socket.timeout)

Report = Callable[[str, int, int], None]  # file, bytes on this disk, bytes in total

_MEMBER = re.compile(r"(?:npz/)?(?:tile/)?(?:xla/)?(?P<split>train|valid|test)/(?P<name>[A-Za-z0-9_.+=-]{1,200}\.npz)")
# Limits for untrusted archives, far above the public dataset.
_MAX_MEMBERS = 1_000_000
_MAX_FILE_BYTES = 1 << 30
_MAX_ARCHIVE_BYTES = 1 << 40


@dataclass(frozen=True)
class RemoteFile:
    """A file on the server as the server describes it; `validator` identifies its version, `md5` may be empty."""

    name: str
    url: str
    size: int
    validator: str
    md5: str

    def partial_path(self, folder: Path) -> Path:
        """Return the path in `folder` at which an incomplete download of this version is stored."""
        version = hashlib.sha256(f"{self.validator} {self.size}".encode()).hexdigest()[:16]
        return folder / f"{self.name}.{version}.part"

    def is_complete(self, folder: Path) -> bool:
        path = folder / self.name
        return path.is_file() and path.stat().st_size == self.size

    def bytes_present(self, folder: Path) -> int:
        """Return how many bytes of this version of the file are already in `folder`."""
        if self.is_complete(folder):
            return self.size
        partial = self.partial_path(folder)
        size = partial.stat().st_size if partial.is_file() else 0
        return size if size <= self.size else 0


@dataclass(frozen=True)
class DownloadPlan:
    """The files of a download, their size, and the number of bytes that are on this disk already."""

    files: list[RemoteFile]
    total_bytes: int
    present_bytes: int

    @property
    def bytes_to_fetch(self) -> int:
        return self.total_bytes - self.present_bytes


def archive_name(split: str) -> str:
    """Return the name of a split's archive on the server."""
    if split not in SPLITS:
        raise ConfigurationError(f"There is no split {split!r}; use {', '.join(SPLITS)}.")
    return f"npz_tile_xla_{split}.tar"


def plan_download(folder: Path, splits: Sequence[str] = SPLITS, base_url: str = BASE_URL) -> DownloadPlan:
    """Ask the server for the sizes of the files; nothing is downloaded yet."""
    files = [_describe(base_url, archive_name(split)) for split in splits]
    present = sum(remote.bytes_present(folder) for remote in files)
    return DownloadPlan(files, sum(remote.size for remote in files), present)


def estimate_seconds(plan: DownloadPlan, folder: Path, sample_bytes: int = 4 << 20) -> float:
    """Estimate the duration of the download by timing its first `sample_bytes`, which are kept."""
    for remote in plan.files:
        bytes_before = remote.bytes_present(folder)
        if bytes_before < remote.size:
            start = time.monotonic()
            with _exclusive(folder), contextlib.suppress(*_CONNECTION_ERRORS):
                _fetch_once(remote, folder, _ignore, stop_at=min(remote.size, bytes_before + sample_bytes))
            new_bytes = remote.bytes_present(folder) - bytes_before
            seconds = max(time.monotonic() - start, 1e-3)
            return max(0, plan.bytes_to_fetch - new_bytes) * seconds / max(new_bytes, 1)
    return 0.0


def _ignore(name: str, position: int, total: int) -> None:
    """Discard a progress report; the default of `report` parameters."""


def fetch(remote: RemoteFile, folder: Path, report: Report = _ignore, attempts: int = 8, wait_s: float = 1.0) -> Path:
    """Download `remote` into `folder` and verify it; a broken connection is resumed.

    It fails after `attempts` attempts in a row without progress, `wait_s` seconds apart. Returns the file's path.
    """
    target = folder / remote.name
    with _exclusive(folder):
        if remote.is_complete(folder):
            return target
        failures = 0
        while remote.bytes_present(folder) < remote.size:
            bytes_before = remote.bytes_present(folder)
            try:
                _fetch_once(remote, folder, report)
            except _CONNECTION_ERRORS as error:
                # Only attempts without progress count: a slow, unreliable connection may break any number of times.
                failures = failures + 1 if remote.bytes_present(folder) == bytes_before else 0
                if failures >= attempts or _is_refusal(error):
                    raise UnavailableError(
                        f"{remote.url} keeps failing ({_reason(error)}); run the command again to continue."
                    ) from error
                time.sleep(min(wait_s * 2**failures, _MAX_WAIT_S))
        # The file gets its name only after the check, so a file without ".part" is good.
        _verify(remote.partial_path(folder), remote)
        remote.partial_path(folder).replace(target)
    return target


def download_split(split: str, plan: DownloadPlan, data_root: Path, report: Report = _ignore) -> UnpackReport:
    """Download the archive of `split` and unpack its kernel files under `data_root`."""
    remote = next(remote for remote in plan.files if remote.name == archive_name(split))
    return unpack_tar(fetch(remote, data_root, report), data_root)


def _describe(base_url: str, name: str) -> RemoteFile:
    """Request the size, ETag and MD5 of the file `name` from the server with a HEAD request."""
    url = urllib.parse.urljoin(base_url, name)
    try:
        with _open_url(url, {}, method="HEAD") as response:
            size = int(response.headers.get("Content-Length") or -1)
            # ETag is exact; the modification time has a resolution of a second.
            validator = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
            md5 = _parse_md5(response.headers.get_all("x-goog-hash") or [])
    except TilewiseError:
        raise
    except (*_CONNECTION_ERRORS, ValueError) as error:
        raise UnavailableError(f"{url} does not answer ({_reason(error)}).") from error
    if size < 0:
        raise UnavailableError(f"{url} does not state its size.")
    return RemoteFile(name, url, size, validator, md5)


def _parse_md5(headers: list[str]) -> str:
    """Return the MD5 in Google's headers ``crc32c=…,md5=<base64>`` as hexadecimal, or ""."""
    for entry in ",".join(headers).split(","):
        key, _, value = entry.strip().partition("=")
        if key == "md5":
            with contextlib.suppress(ValueError):
                return base64.b64decode(value, validate=True).hex()
    return ""


def _open_url(url: str, headers: dict[str, str], method: str = "GET") -> Any:
    """Send an HTTP request and return the open response; a redirect is refused unless it is https or local."""
    _check_address(url)
    request = urllib.request.Request(url, headers=headers, method=method)
    return urllib.request.build_opener(_CheckedRedirects).open(request, timeout=_TIMEOUT_S)


def _check_address(url: str) -> None:
    """Raise `ConfigurationError` unless the address is https or on this machine."""
    address = urllib.parse.urlsplit(url)
    if address.scheme != "https" and not (address.scheme == "http" and address.hostname in _LOCAL_HOSTS):
        raise ConfigurationError(f"{url[:200]} is not an https address; data is downloaded over https only.")


class _CheckedRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but not away from https."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        """Check the new address before following it."""
        _check_address(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _fetch_once(remote: RemoteFile, folder: Path, report: Report, stop_at: int | None = None) -> None:
    """Append to a partial file over one connection, up to `stop_at` bytes in all (None: the whole file)."""
    folder.mkdir(parents=True, exist_ok=True)
    offset = remote.bytes_present(folder)
    end = remote.size if stop_at is None else stop_at
    if offset >= end:
        return
    if offset == 0:
        # Nothing usable is there: discard bytes of other versions.
        for old in folder.glob(f"{remote.name}.*.part"):
            old.unlink()
    headers = {"Range": f"bytes={offset}-{end - 1}"}
    # With If-Range the server sends the whole file instead of a range if its version differs.
    if remote.validator:
        headers["If-Range"] = remote.validator
    with _open_url(remote.url, headers) as response:
        # A status other than 206 (partial content): the file has changed, or the server does not support ranges.
        if response.status != 206:
            if response.headers.get("Content-Length") not in (None, str(remote.size)):
                raise UnavailableError(f"{remote.url} changed during the download; run the command again.")
            offset = 0
        elif not str(response.headers.get("Content-Range", "")).startswith(f"bytes {offset}-"):
            raise http.client.HTTPException("the server sent a range that was not requested")
        with remote.partial_path(folder).open("r+b" if offset else "wb") as stream:
            stream.seek(offset)
            _copy_response(response, stream, remote, end, report)


def _copy_response(response: IO[bytes], stream: IO[bytes], remote: RemoteFile, end: int, report: Report) -> None:
    """Copy a response to the end of the file `stream` until the file has `end` bytes; report progress."""
    position = stream.tell()
    while position < end:
        block = response.read(min(_BLOCK_BYTES, end - position))
        if not block:
            raise http.client.HTTPException("the connection ended early")
        try:
            stream.write(block)
        # A full disk must not look like a broken connection, which would be retried.
        except OSError as error:
            raise UnavailableError(f"{remote.name} cannot be written ({error.strerror or error}).") from error
        position += len(block)
        report(remote.name, position, remote.size)


def _verify(path: Path, remote: RemoteFile) -> None:
    """Compare a downloaded file's MD5 with the server's; remove the file and raise if they differ."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    if remote.md5 and digest.hexdigest() != remote.md5:
        path.unlink()
        raise FileFormatError(f"{remote.name} is damaged (its MD5 differs from the server's); run the command again.")


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Lock the folder, so that only one process downloads into it at a time; raise if it is locked already."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(file_lock(folder / ".download.lock", wait=False))
        except BlockingIOError as error:
            raise UnavailableError(f"Another download into {folder} is running.") from error
        yield


def _is_refusal(error: BaseException) -> bool:
    """Tell whether an error is the server's refusal (HTTP 4xx), which makes another attempt pointless."""
    # 408 (request timeout) and 429 (too many requests) are temporary.
    return isinstance(error, urllib.error.HTTPError) and 400 <= error.code < 500 and error.code not in (408, 429)


def _reason(error: BaseException) -> str:
    return str(getattr(error, "reason", "") or error or type(error).__name__).replace("\n", " ")


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
    """Yield the regular files of `tar`; raise `FileFormatError` at a member that a kernel archive cannot have."""
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
    """Move the files of each subfolder of `unfinished` into the same subfolder of `folder`."""
    for file in sorted(unfinished.glob("*/*")):
        target = folder / file.relative_to(unfinished)
        target.parent.mkdir(exist_ok=True)
        file.replace(target)
