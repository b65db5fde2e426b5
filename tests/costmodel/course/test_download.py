"""The download against a server that breaks off, changes, lies and refuses; and archives nobody should unpack."""

from __future__ import annotations

import base64
import hashlib
import io
import socket
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tilewise.costmodel.course import download
from tilewise.costmodel.course.download import unpack_tar
from tilewise.errors import ConfigurationError, FileFormatError, TilewiseError, UnavailableError


def tar_bytes(*members: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


class Server(ThreadingHTTPServer):
    """Serves one content under every name; `break_after` bytes each connection is cut."""

    content = b""
    break_after: int | None = None
    ranges = True
    md5: bytes | None = None
    etag = '"1"'
    requests: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _head(self, status: int, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("ETag", self.server.etag)
        digest = self.server.md5 or hashlib.md5(self.server.content, usedforsecurity=False).digest()
        self.send_header("x-goog-hash", "crc32c=AAAAAA==")
        self.send_header("x-goog-hash", "md5=" + base64.b64encode(digest).decode())

    def do_HEAD(self) -> None:
        if "npz_tile" not in self.path:
            self.send_error(404)
            return
        self._head(200, len(self.server.content))
        self.end_headers()

    def do_GET(self) -> None:
        content, byte_range = self.server.content, self.headers.get("Range")
        self.server.requests.append(byte_range or "")
        usable = self.server.ranges and self.headers.get("If-Range") == self.server.etag
        if byte_range and usable:
            first, last = (int(number) for number in byte_range.removeprefix("bytes=").split("-"))
            body = content[first : last + 1]
            self._head(206, len(body))
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        else:
            body = content
            self._head(200, len(body))
        self.end_headers()
        self.wfile.write(body[: self.server.break_after])
        self.close_connection = True


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    server.requests = []
    server.content = tar_bytes(*((f"npz/tile/xla/train/p_{i}.npz", bytes([i]) * 70_000) for i in range(10)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_split_arrives_and_its_kernels_are_in_place(server: Server, tmp_path: Path) -> None:
    plan = download.plan_download(tmp_path, ["train"], server.url)
    assert plan.bytes_to_fetch == len(server.content)
    result = download.download_split("train", plan, tmp_path)
    assert result.kernels == {"train": 10}
    assert (tmp_path / "npz/tile/xla/train/p_3.npz").read_bytes() == b"\3" * 70_000
    assert not list(tmp_path.rglob("*.part*")) and not list(tmp_path.rglob(".*.unfinished"))


def test_a_connection_that_breaks_is_taken_up_where_it_stopped(server: Server, tmp_path: Path) -> None:
    server.break_after = 100_001
    plan = download.plan_download(tmp_path, ["train"], server.url)
    path = download.fetch(plan.files[0], tmp_path, wait_s=0.0)
    assert path.read_bytes() == server.content
    assert len(server.requests) == -(-len(server.content) // 100_001)
    assert server.requests[1].startswith("bytes=100001-")


def test_a_second_run_continues_what_the_first_left(server: Server, tmp_path: Path) -> None:
    plan = download.plan_download(tmp_path, ["train"], server.url)
    assert download.estimate_seconds(plan, tmp_path, sample_bytes=50_000) > 0
    again = download.plan_download(tmp_path, ["train"], server.url)
    assert again.present_bytes == 50_000
    assert download.fetch(again.files[0], tmp_path).read_bytes() == server.content
    assert download.plan_download(tmp_path, ["train"], server.url).bytes_to_fetch == 0


def test_a_file_that_changed_on_the_server_starts_over(server: Server, tmp_path: Path) -> None:
    plan = download.plan_download(tmp_path, ["train"], server.url)
    download.estimate_seconds(plan, tmp_path, sample_bytes=50_000)
    server.content, server.etag = server.content[::-1], '"2"'
    plan = download.plan_download(tmp_path, ["train"], server.url)
    assert plan.present_bytes == 0
    assert download.fetch(plan.files[0], tmp_path).read_bytes() == server.content


def test_a_server_without_ranges_is_read_from_the_start(server: Server, tmp_path: Path) -> None:
    plan = download.plan_download(tmp_path, ["train"], server.url)
    download.estimate_seconds(plan, tmp_path, sample_bytes=50_000)
    server.ranges = False
    assert download.fetch(plan.files[0], tmp_path).read_bytes() == server.content


def test_damage_on_the_way_is_noticed_and_nothing_is_kept(server: Server, tmp_path: Path) -> None:
    server.md5 = bytes(16)
    plan = download.plan_download(tmp_path, ["train"], server.url)
    with pytest.raises(FileFormatError, match="MD5"):
        download.fetch(plan.files[0], tmp_path)
    assert not list(tmp_path.glob("*.tar*.part"))


def test_a_server_that_never_delivers_gets_one_sentence(server: Server, tmp_path: Path) -> None:
    server.break_after = 0
    plan = download.plan_download(tmp_path, ["train"], server.url)
    with pytest.raises(UnavailableError, match="run the command again"):
        download.fetch(plan.files[0], tmp_path, attempts=3, wait_s=0.0)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/", "file:///etc/"])
def test_no_server_gets_one_sentence(url: str, tmp_path: Path) -> None:
    with pytest.raises(TilewiseError):
        download.plan_download(tmp_path, ["train"], url)


def archive_with(tmp_path: Path, kind: bytes = tarfile.REGTYPE, name: str = "train/a.npz", link: str = "") -> Path:
    path = tmp_path / "bad.tar"
    with tarfile.open(path, "w") as tar:
        good = tarfile.TarInfo("train/good.npz")
        good.size = 3
        tar.addfile(good, io.BytesIO(b"abc"))
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, link
        tar.addfile(info)
    return path


@pytest.mark.parametrize(
    ("kind", "name", "link"),
    [
        (tarfile.SYMTYPE, "train/a.npz", "/etc/passwd"),
        (tarfile.LNKTYPE, "train/a.npz", "train/good.npz"),
        (tarfile.CHRTYPE, "train/a.npz", ""),
        (tarfile.FIFOTYPE, "train/a.npz", ""),
        (tarfile.REGTYPE, "/tmp/a.npz", ""),
        (tarfile.REGTYPE, "train/../../a.npz", ""),
        (tarfile.DIRTYPE, "../elsewhere", ""),
    ],
)
def test_hostile_archives_leave_nothing_behind(tmp_path: Path, kind: bytes, name: str, link: str) -> None:
    archive = archive_with(tmp_path, kind, name, link)
    with pytest.raises(FileFormatError, match="not accepted"):
        unpack_tar(archive, tmp_path / "data")
    assert not [path for path in (tmp_path / "data").rglob("*") if path.is_file()]


def test_truncated_archives_leave_nothing_behind(tmp_path: Path) -> None:
    whole = tar_bytes(("npz/tile/xla/test/x.npz", b"1" * 5000), ("npz/tile/xla/test/y.npz", b"2" * 5000))
    for length in (0, 100, 600, 3000, 6000, 9000):
        (tmp_path / "t.tar").write_bytes(whole[:length])
        with pytest.raises(FileFormatError):
            unpack_tar(tmp_path / "t.tar", tmp_path / "data")
        assert not list((tmp_path / "data").rglob("*.npz"))


def test_a_second_archive_of_the_same_split_adds_to_it(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.tar").write_bytes(tar_bytes((f"./npz/tile/xla/valid/{name}.npz", b"1"), ("README", b"hi")))
        result = unpack_tar(tmp_path / f"{name}.tar", tmp_path)
        assert (result.kernels, result.ignored) == ({"valid": 1}, 1)
    assert sorted(path.name for path in (tmp_path / "npz/tile/xla/valid").iterdir()) == ["a.npz", "b.npz"]


def test_data_come_over_https_alone_unless_from_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_connection", lambda *a, **k: pytest.fail("nothing may be asked"))
    assert download.BASE_URL.startswith("https://")
    for url in ("http://example.org/", "ftp://example.org/", "http://127.0.0.1.example.org/"):
        with pytest.raises(ConfigurationError, match="https"):
            download.plan_download(tmp_path, ("valid",), url)


def test_a_server_that_sends_on_to_plain_http_is_not_followed(server: Server, tmp_path: Path) -> None:
    class Elsewhere(Handler):
        def do_HEAD(self) -> None:
            self.send_response(302)
            self.send_header("Location", "http://example.org/npz_tile_xla_valid.tar")
            self.end_headers()

    server.RequestHandlerClass = Elsewhere  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match="https"):
        download.plan_download(tmp_path, ("valid",), server.url)
