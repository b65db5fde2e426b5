"""Two machines, as far as the network goes: `ray start` on each of two network namespaces, one campaign over both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.campaign import shapes
from tests.fleet.netns import Side, two_sides, why_no_namespaces
from tests.fleet.rays import NEEDS_RAY
from tests.waiting import until
from tilewise._extension import native
from tilewise.store.store import Store

needs_native = pytest.mark.skipif(native is None, reason="the compiled kernels are not installed")
KERNELS, CONFIGS, PORT = 24, 6, 6390


def start_ray(side: Side, folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """A node with a slot, in the foreground, so that it ends with its namespace."""
    from tilewise_fleet.up import _ray_program

    options = [f"--node-ip-address={side.address}", "--num-cpus=0", "--resources={\"cpu:test\": 1}", "--block",
               f"--object-store-memory={80 << 20}", "--disable-usage-stats", f"--temp-dir={folder}"]  # fmt: skip
    if "--head" not in words:
        options.pop()  # the head says where
    return side.start(
        sys.executable, str(_ray_program()), "start", *words, *options, env=environment(), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "RAY_USAGE_STATS_ENABLED": "0"}


@NEEDS_RAY
@needs_native
@pytest.mark.slow
def test_a_campaign_over_two_network_namespaces_goes_on_when_one_of_them_is_gone(tmp_path: Path) -> None:
    reason = why_no_namespaces()
    if reason is not None:
        pytest.skip(reason)
    store = str(tmp_path / "s.sqlite")
    with two_sides() as (first, second):
        start_ray(first, Path(f"/tmp/twns{os.getpid()}"), "--head", f"--port={PORT}", "--include-dashboard=false")
        address = f"{first.address}:{PORT}"
        until(lambda: reached(second, first.address), "the head to listen", 90)
        other = start_ray(second, tmp_path, f"--address={address}")
        driver, log = campaign(first, address, store, shapes(tmp_path, KERNELS))
        until(lambda: log.read_text().count('"started"') >= 2, "both nodes to start", 180)
        until(lambda: done(store) >= KERNELS // 3, "a third", 180)
        assert len({line.split('"slot": "')[1].split(" ")[0] for line in measured_lines(log)}) == 2, (
            "both had a part in it"
        )
        other.kill()
        kill_all(second)
        assert driver.wait(300) == 0, log.read_text()[-2000:]
    assert done(store) == KERNELS
    with Store(store) as journal:
        assert journal.queue_length() == 0


def reached(side: Side, host: str) -> bool:
    code = f"import socket; socket.create_connection(({host!r}, {PORT}), 1)"
    return side.start(sys.executable, "-c", code, stderr=subprocess.DEVNULL).wait() == 0


def kill_all(side: Side) -> None:
    pids = subprocess.run(["ip", "netns", "pids", side.name], capture_output=True, text=True, check=True).stdout
    for process in pids.split():
        os.kill(int(process), 9)


def campaign(side: Side, address: str, store: str, path: Path) -> tuple[subprocess.Popen[bytes], Path]:
    words = ["--ray", address, "--store", store, "--shapes", str(path), "--configs", str(CONFIGS), "--json"]
    log = path.with_suffix(".log")
    with log.open("wb") as out:
        return side.start(
            sys.executable, "-m", "tilewise.cli.app", "collect", "cpu", *words, env=environment(), stdout=out,
            stderr=subprocess.STDOUT,
        ), log  # fmt: skip


def measured_lines(log: Path) -> list[Any]:
    return [line for line in log.read_text().splitlines() if '"measured"' in line]


def done(store: str) -> int:
    with Store(store) as journal:
        return len(journal.finished())
