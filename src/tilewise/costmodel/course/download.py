"""Fetches the TpuGraphs tile dataset: resumable, verified, and unpacked without trusting the archive.

A file arrives as ``<name>.part`` beside a note of the server's validator, so that a broken connection or a killed
process continues where it stopped, and starts over only if the file on the server has changed. Its size, and its MD5
where the server gives one, are checked before it gets its name. Both come over https, as the file does, so that nobody
on the way can change either; only a server on this very machine may speak http. See `unpack` for what is accepted from
an archive.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tilewise._files import locked, read_json_input, write_whole
from tilewise.costmodel.course.unpack import Unpacked, unpack_tar
from tilewise.errors import ConfigurationError, FileFormatError, TilewiseError, UnavailableError

BASE_URL = "https://storage.googleapis.com/download.tensorflow.org/data/tpu_graphs/v0/"
SPLITS = ("train", "valid", "test")
_BLOCK = 1 << 18
_TIMEOUT_S = 60.0
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
_BROKEN = (OSError, http.client.HTTPException, socket.timeout)

Report = Callable[[str, int, int], None]  # file, bytes there, bytes in all


@dataclass(frozen=True)
class Remote:
    """A file on the server as it described it: its length, the validator of this version, its MD5 where given."""

    name: str
    url: str
    size: int
    validator: str
    md5: str


@dataclass(frozen=True)
class Plan:
    """What a download has to move: the files, their bytes, and how many of those are on this disk already."""

    files: list[Remote]
    total_bytes: int
    present_bytes: int

    @property
    def bytes_to_fetch(self) -> int:
        return self.total_bytes - self.present_bytes


def archive_name(split: str) -> str:
    """The name of a split's archive on the server."""
    if split not in SPLITS:
        raise ConfigurationError(f"There is no split {split!r}; use {', '.join(SPLITS)}.")
    return f"npz_tile_xla_{split}.tar"


def plan_download(folder: Path, splits: Sequence[str] = SPLITS, base_url: str = BASE_URL) -> Plan:
    """Ask the server for the sizes; nothing is fetched yet."""
    files = [_describe(base_url, archive_name(split)) for split in splits]
    present = sum(_bytes_present(folder, remote) for remote in files)
    return Plan(files, sum(remote.size for remote in files), present)


def estimate_seconds(plan: Plan, folder: Path, sample_bytes: int = 4 << 20) -> float:
    """How long the download will take: the first few MiB, which are kept, are fetched and timed."""
    for remote in plan.files:
        there = _bytes_present(folder, remote)
        if there < remote.size:
            started = time.monotonic()
            with _alone(folder), contextlib.suppress(*_BROKEN):
                _fetch_once(remote, folder, _ignore, stop_at=min(remote.size, there + sample_bytes))
            fetched = _bytes_present(folder, remote) - there
            seconds = max(time.monotonic() - started, 1e-3)
            return max(0, plan.bytes_to_fetch - fetched) * seconds / max(fetched, 1)
    return 0.0


def fetch(remote: Remote, folder: Path, report: Report | None = None, attempts: int = 8, wait_s: float = 1.0) -> Path:
    """The file `remote` in `folder`, whole and verified; a broken connection is taken up again."""
    report = report or _ignore
    target = folder / remote.name
    with _alone(folder):
        if _is_whole(target, remote):
            return target
        failures = 0
        while _bytes_present(folder, remote) < remote.size:
            before = _bytes_present(folder, remote)
            try:
                _fetch_once(remote, folder, report)
            except _BROKEN as error:
                failures = failures + 1 if _bytes_present(folder, remote) == before else 0
                if failures >= attempts or _is_refusal(error):
                    raise UnavailableError(
                        f"{remote.url} keeps failing ({_reason(error)}); run the command again to continue."
                    ) from error
                time.sleep(min(wait_s * 2**failures, 30.0))
        _verify(_part(folder, remote.name), remote)
        _part(folder, remote.name).replace(target)
        _note(folder, remote.name).unlink(missing_ok=True)
    return target


def download_split(split: str, plan: Plan, data_root: Path, report: Report | None = None) -> Unpacked:
    """Fetch the archive of `split` and put its kernel files in place."""
    remote = next(remote for remote in plan.files if remote.name == archive_name(split))
    return unpack_tar(fetch(remote, data_root, report), data_root)


def _describe(base_url: str, name: str) -> Remote:
    url = urllib.parse.urljoin(base_url, name)
    try:
        with _open(url, {}, method="HEAD") as answer:
            size = int(answer.headers.get("Content-Length") or -1)
            etag = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
            md5 = _md5_of(answer.headers.get_all("x-goog-hash") or [])
    except TilewiseError:
        raise
    except (*_BROKEN, ValueError) as error:
        raise UnavailableError(f"{url} does not answer ({_reason(error)}).") from error
    if size < 0:
        raise UnavailableError(f"{url} does not tell how large it is.")
    return Remote(name, url, size, etag, md5)


def _md5_of(headers: list[str]) -> str:
    """The hex MD5 in ``crc32c=…,md5=<base64>`` headers, or nothing."""
    for part in ",".join(headers).split(","):
        key, _, value = part.strip().partition("=")
        if key == "md5":
            with contextlib.suppress(ValueError):
                return base64.b64decode(value, validate=True).hex()
    return ""


def _open(url: str, headers: dict[str, str], method: str = "GET") -> Any:
    _check_address(url)
    request = urllib.request.Request(url, headers=headers, method=method)
    return urllib.request.build_opener(_Redirects).open(request, timeout=_TIMEOUT_S)


def _check_address(url: str) -> None:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _THIS_MACHINE):
        raise ConfigurationError(f"{url[:200]} is not an https address; data are fetched over no other.")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a server that sends on, but not away from https."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        _check_address(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _fetch_once(remote: Remote, folder: Path, report: Report, stop_at: int | None = None) -> None:
    """Continue the part file over one connection, up to `stop_at` bytes or the end."""
    folder.mkdir(parents=True, exist_ok=True)
    there = _bytes_present(folder, remote)
    last = remote.size if stop_at is None else stop_at
    if there >= last:
        return
    if there == 0:
        _part(folder, remote.name).unlink(missing_ok=True)
        write_whole(_note(folder, remote.name), json.dumps({"validator": remote.validator, "size": remote.size}))
    headers = {"Range": f"bytes={there}-{last - 1}"}
    if remote.validator:
        headers["If-Range"] = remote.validator
    with _open(remote.url, headers) as answer:
        if answer.status != 206:  # the server sends everything: another version, or no ranges there
            if answer.headers.get("Content-Length") not in (None, str(remote.size)):
                raise UnavailableError(f"{remote.url} changed while it was fetched; run the command again.")
            there = 0
        elif not str(answer.headers.get("Content-Range", "")).startswith(f"bytes {there}-"):
            raise http.client.HTTPException("the server sent another range than the one asked for")
        with _part(folder, remote.name).open("r+b" if there else "wb") as stream:
            stream.seek(there)
            _copy(answer, stream, remote, last, report)


def _copy(answer: IO[bytes], stream: IO[bytes], remote: Remote, last: int, report: Report) -> None:
    done = stream.tell()
    while done < last:
        block = answer.read(min(_BLOCK, last - done))
        if not block:
            raise http.client.HTTPException("the connection ended early")
        try:
            stream.write(block)
        except OSError as error:
            raise UnavailableError(f"{remote.name} cannot be written ({error.strerror or error}).") from error
        done += len(block)
        report(remote.name, done, remote.size)


def _bytes_present(folder: Path, remote: Remote) -> int:
    """How much of this very version is on the disk; a part of another version counts as nothing."""
    if _is_whole(folder / remote.name, remote):
        return remote.size
    try:
        note = read_json_input(_note(folder, remote.name))
        size = _part(folder, remote.name).stat().st_size
    except (OSError, TilewiseError):
        return 0
    same = isinstance(note, dict) and note == {"validator": remote.validator, "size": remote.size}
    return size if same and size <= remote.size else 0


def _is_whole(path: Path, remote: Remote) -> bool:
    return path.is_file() and path.stat().st_size == remote.size


def _verify(path: Path, remote: Remote) -> None:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    if remote.md5 and digest.hexdigest() != remote.md5:
        path.unlink()
        raise FileFormatError(
            f"{remote.name} arrived damaged (its MD5 differs from the server's); run the command again."
        )


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep a second download out of the same folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / ".download.lock", wait=False))
        except BlockingIOError as error:
            raise UnavailableError(f"Another download into {folder} is running.") from error
        yield


def _part(folder: Path, name: str) -> Path:
    return folder / f"{name}.part"


def _note(folder: Path, name: str) -> Path:
    return folder / f"{name}.part.json"


def _is_refusal(error: BaseException) -> bool:
    """Whether trying again is pointless: the server answered, and said no."""
    return isinstance(error, urllib.error.HTTPError) and 400 <= error.code < 500 and error.code not in (408, 429)


def _reason(error: BaseException) -> str:
    return str(getattr(error, "reason", "") or error or type(error).__name__).replace("\n", " ")


def _ignore(name: str, done: int, total: int) -> None:
    """Report to nobody."""
