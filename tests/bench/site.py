"""A served board in a process of its own, for tests that need a real one: to kill, to fuzz, to look at."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

from tests.waiting import PATIENCE, until


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Served:
    """`tilewise compete serve` on a port of its own."""

    def __init__(
        self, board: str, key: Path, workers: int = 0, rate: float = 40.0, module: str = "tilewise.cli.app"
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        words = ["serve", "--board", board, "--key", str(key), "--port", str(self.port), "--workers", str(workers)]
        words += ["--most-queued", "100000", "--rate", str(rate), "--access-log", str(key.with_name("access.log"))]
        self._command = [sys.executable, "-m", module, "compete", *words]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
        until(self._answers, "the server's first answer")

    def _answers(self) -> bool:
        assert self.process.poll() is None, f"the server ended with {self.process.returncode}"
        with contextlib.suppress(OSError), urlopen(f"{self.url}/health", timeout=PATIENCE):
            return True
        return False

    def workers(self) -> list[int]:
        """The processes that the server's threads have started."""
        latencies: list[int] = []
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                latencies += [int(child) for child in (task / "children").read_text().split()]
        return latencies

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
