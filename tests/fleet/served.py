"""`tilewise fleet serve` in a process of its own, for tests that need a real one: to ask, to kill, to fuzz."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
from typing import Any
from urllib.request import urlopen

from tests.bench.site import free_port
from tests.waiting import PATIENCE, until
from tilewise.store.store import Store


class ServedStore:
    """A service over a store, on a port of its own."""

    def __init__(self, store: str, *words: str) -> None:
        Store(store).close()  # `serve` refuses a file that does not exist
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        options = ["--store", store, "--port", str(self.port), *words]
        self._command = [sys.executable, "-m", "tilewise.cli.app", "fleet", "serve", *options]
        self.start()

    def start(self) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(self._command, env=environment, stdout=subprocess.DEVNULL)
        until(self._answers, "the service's first answer")

    def _answers(self) -> bool:
        assert self.process.poll() is None, f"the service ended with {self.process.returncode}"
        with contextlib.suppress(OSError), urlopen(f"{self.url}/health", timeout=PATIENCE):
            return True
        return False

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        self.process.terminate()
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def __enter__(self) -> ServedStore:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.stop()


def post(port: int, path: str, content: Any, token: str | None = None) -> tuple[int, dict[str, Any]]:
    """One request; the status and what was said."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()
