"""Reading what somebody names: regular files within a limit, and one sentence about anything else."""

from __future__ import annotations

import gzip
import io
import os
import socket
import threading
from pathlib import Path

import pytest

from tilewise import _files
from tilewise._files import gunzip, open_input, parse_json, read_input, read_json_input, read_text_input
from tilewise.errors import FileFormatError, Rejected, TilewiseError, UnavailableError

LIMIT = 1 << 20


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def loop(folder: Path) -> Path:
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")
    return folder / "a"


def listening(folder: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "s"))
    return folder / "s"


def holes(folder: Path) -> Path:
    with (folder / "holes").open("wb") as stream:
        stream.truncate(1 << 40)
    return folder / "holes"


HOSTILE = {
    "a pipe without a writer": pipe,
    "a loop of links": loop,
    "a socket": listening,
    "a folder": lambda folder: folder,
    "a file of a terabyte": holes,
    "an endless device": lambda folder: Path("/dev/zero"),
    "a full device": lambda folder: Path("/dev/full"),
    "a terminal": lambda folder: Path("/dev/tty"),
    "a name with a null byte": lambda folder: folder / "a\0b",
    "a name too long": lambda folder: folder / ("x" * 5000),
    "a file below a file": lambda folder: Path(__file__) / "below",
    "nothing": lambda folder: folder / "nothing",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("reader", [open_input, read_input, read_text_input, read_json_input])
def test_what_is_not_a_file_of_a_sensible_size_is_one_sentence(tmp_path, name, reader):
    path = HOSTILE[name](tmp_path)
    with pytest.raises(TilewiseError) as caught:
        reader(path, LIMIT)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_a_missing_file_is_both_kinds_of_error_that_readers_have_given(tmp_path):
    for kind in (FileFormatError, UnavailableError):
        with pytest.raises(kind, match="does not exist"):
            open_input(tmp_path / "nothing", LIMIT)


def test_a_link_to_a_file_is_a_file(tmp_path):
    (tmp_path / "real").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("real")
    assert read_input(tmp_path / "link", 5) == b"12345"
    with pytest.raises(FileFormatError, match="more than the limit of 4 bytes"):
        read_input(tmp_path / "link", 4)


def test_a_pipe_that_takes_a_files_place_between_looking_and_opening_does_not_hang(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"1")
    looked, real = (tmp_path / "file").stat(), pipe(tmp_path)
    monkeypatch.setattr(_files.Path, "stat", lambda self: looked)
    with pytest.raises(FileFormatError, match="is a pipe"):
        open_input(real, LIMIT)


def test_a_file_of_the_system_that_says_it_is_empty_is_read_no_further_than_the_limit():
    with pytest.raises(FileFormatError, match="larger than the limit of 10 bytes"):
        read_input("/proc/self/maps", 10)


def test_a_sparse_file_within_the_limit_is_refused_and_a_written_one_is_not(tmp_path):
    size = 80 << 20
    with (tmp_path / "holes").open("wb") as stream:
        stream.truncate(size)
    with pytest.raises(FileFormatError, match="sparse file"):
        open_input(tmp_path / "holes", 1 << 30)
    (tmp_path / "whole").write_bytes(bytes(size))
    with open_input(tmp_path / "whole", 1 << 30) as stream:
        assert len(stream.read()) == size


def test_no_descriptor_is_left_open_by_a_refusal(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        with pytest.raises(FileFormatError):
            open_input(tmp_path / "x", 1)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("text", [b"{", b"\xff\xfe", b"[" * 200_000, b"9" * 5000, b"", b"[1" + b" " * 100])
def test_what_is_not_json_is_one_sentence(text):
    with pytest.raises(FileFormatError, match=r"^here (is not|contains more) JSON"):
        parse_json(text, "here", limit=len(text) - (text[:2] == b"[1"))


def test_gzip_is_unfolded_no_further_than_the_limit():
    whole = gzip.compress(bytes(1000))
    assert gunzip(whole, "here", 1000) == bytes(1000)
    with pytest.raises(FileFormatError, match="decompresses to more"):
        gunzip(whole, "here", 999)
    for damaged in (b"abc", whole[:-9], whole[:12] + b"\xff" * 9 + whole[21:], whole[:-8] + bytes(8)):
        with pytest.raises(FileFormatError, match="gzip"):
            gunzip(damaged, "here", 1000)


def test_threads_may_open_while_others_are_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    failures: list[BaseException] = []

    def read_repeatedly() -> None:
        try:
            for _ in range(200):
                assert read_input(tmp_path / "x", 5) == b"12345"
                with pytest.raises(FileFormatError):
                    read_input(tmp_path / "x", 4)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read_repeatedly) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_device_is_called_one():
    with pytest.raises(FileFormatError, match="is a device, not a file"):
        open_input("/dev/zero", LIMIT)


def test_an_error_is_one_line_of_printable_characters() -> None:
    """Names and values of a stranger's file are quoted; one had 70,135 characters, others move a terminal's cursor."""
    long = str(FileFormatError("x" * 70_000 + " is not a file; name another."))
    assert len(long) <= 400 and long.startswith("xxx") and long.endswith("name another.")
    assert str(FileFormatError("a\x1b[2J\u202eb\nc\0")) == "a?[2J?b?c?"
    assert str(Rejected("code", "b\x07")) == "b?"
    assert str(FileFormatError("plain – “ü” 日本")) == "plain – “ü” 日本"


def test_a_file_of_the_kernel_without_data_is_empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """/proc/kmsg is a regular file that gives None if nobody has logged anything since it was opened."""

    class Silent(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return None  # type: ignore[return-value]

    monkeypatch.setattr(_files, "open_input", lambda path, limit: Silent())
    assert read_input(tmp_path / "kmsg", 10) == b""


def test_an_integer_that_no_float_can_hold_is_refused_where_it_is_read() -> None:
    assert parse_json("1" * 308, "here") == int("1" * 308)
    for text in ("[" + "1" * 309 + "]", b'{"a": -' + b"9" * 400 + b"}"):
        with pytest.raises(FileFormatError, match="308 digits"):
            parse_json(text, "here")
