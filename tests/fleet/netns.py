"""Two machines on one: network namespaces joined by a pair of virtual Ethernet devices, each with its own address."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


def _ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


def why_no_namespaces() -> str | None:
    """What keeps this machine from having network namespaces; None where nothing does."""
    if shutil.which("ip") is None:
        return "iproute2 is not installed (apt-get install iproute2)"
    if os.getuid() != 0:
        return "network namespaces need root"
    name = f"twprobe{os.getpid()}"
    device = _ip("netns", "add", name)
    if device.returncode == 0:
        joined = _ip("link", "add", f"{name[:10]}a", "type", "veth", "peer", "name", f"{name[:10]}b")
        _ip("link", "del", f"{name[:10]}a")
        _ip("netns", "del", name)
        device = joined
    return None if device.returncode == 0 else f"this system forbids network namespaces ({device.stderr.strip()[:120]})"


@dataclass(frozen=True)
class Side:
    """One of the two: its namespace and its address."""

    name: str
    address: str

    def start(self, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["ip", "netns", "exec", self.name, *words], **options)


@contextlib.contextmanager
def two_sides() -> Iterator[tuple[Side, Side]]:
    """Two namespaces that reach each other and nothing else."""
    mark = os.getpid() % 100_000
    sides = Side(f"tw{mark}a", "10.97.41.1"), Side(f"tw{mark}b", "10.97.41.2")
    try:
        for side in sides:
            _checked("netns", "add", side.name)
        _checked("link", "add", f"v{mark}a", "netns", sides[0].name, "type", "veth", "peer", "name", f"v{mark}b",
                 "netns", sides[1].name)  # fmt: skip
        for side, end in zip(sides, "ab", strict=True):
            device = f"v{mark}{end}"
            _checked("-n", side.name, "addr", "add", f"{side.address}/24", "dev", device)
            _checked("-n", side.name, "link", "set", device, "up")
            _checked("-n", side.name, "link", "set", "lo", "up")
        yield sides
    finally:
        for side in sides:
            for process in _ip("netns", "pids", side.name).stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), 9)
            _ip("netns", "del", side.name)


def _checked(*words: str) -> None:
    done = _ip(*words)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
