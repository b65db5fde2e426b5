"""Device locks: one timing at a time on a CPU and on each GPU, and a killed process releases its lock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tilewise.errors import UnavailableError
from tilewise_fleet.device_lock import exclusive_device

HOLD = """
from tilewise_fleet.device_lock import exclusive_device
import time
with exclusive_device({!r}, {}, 5) as free:
    print(free, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def holder(kind: str, device: int = 0) -> subprocess.Popen[bytes]:
    """A process that holds a device until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", HOLD.format(kind, device)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"True\n"
    return process


@pytest.mark.parametrize(
    ("held_lock", "wanted_lock", "free"),
    [
        (("cpu", 0), ("cpu", 0), False),
        (("cpu", 0), ("triton", 1), False),
        (("triton", 0), ("cpu", 0), False),
        (("triton", 0), ("triton", 0), False),
        (("triton", 0), ("triton", 1), True),
    ],
)
def test_who_keeps_whom_waiting(held_lock: tuple[str, int], wanted_lock: tuple[str, int], free: bool) -> None:
    process = holder(*held_lock)
    try:
        with exclusive_device(*wanted_lock, 0.05) as locked:
            assert locked is free
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with exclusive_device(*wanted_lock, 5.0) as locked:
        assert locked, "a killed process holds nothing"


def test_another_users_lock_is_shared_and_a_link_is_not_followed(tmp_path: Path) -> None:
    lock = tmp_path / "tilewise-timing-machine.lock"
    lock.touch(0o444)
    with exclusive_device("cpu", 0, 0.05) as locked:
        assert locked
    lock.unlink()
    lock.symlink_to(tmp_path / "elsewhere")
    os.close(os.open(tmp_path / "elsewhere", os.O_CREAT))
    with pytest.raises(UnavailableError, match=r"lock file .* for timings"), exclusive_device("cpu", 0, 0.05):
        pass
