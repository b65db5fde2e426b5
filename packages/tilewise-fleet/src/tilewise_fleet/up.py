"""`tilewise fleet up`: a fleet on one machine, for trying: a local Ray with one slot, a store, and a service over it.

Everything is a child of this process and ends with it. What a real fleet has in addition is in docs/fleet.md.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from tilewise.errors import UnavailableError
from tilewise.store.store import Store
from tilewise_fleet.cluster import require_ray

_SECONDS_TO_START = 60.0
_OBJECT_STORE = 100 << 20  # kernels and results are small


def slot_name() -> str:
    """What this machine's slot is called: cpu and the instruction set in force."""
    from tilewise._extension import native

    return f"cpu:{'portable' if native is None else native.isa()}"


class LocalFleet:
    """The processes of a one-machine fleet."""

    def __init__(self, store: str, port: int, ray_port: int, cpus: int) -> None:
        require_ray()
        Store(store).close()  # made, or refused with a sentence, before anything is started
        self.store, self.port, self.ray_port, self.cpus = store, port, ray_port, cpus
        self.address, self.url = f"127.0.0.1:{ray_port}", f"http://127.0.0.1:{port}"
        self._service: subprocess.Popen[bytes] | None = None
        self._node: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._start_ray()
        serve = ["serve", "--store", self.store, "--port", str(self.port), "--no-tokens"]
        self._service = subprocess.Popen([sys.executable, "-m", "tilewise.cli.app", *serve], stdout=subprocess.DEVNULL)
        self._await_service()

    def _start_ray(self) -> None:
        resources = f'{{"{slot_name()}": 1}}'
        program = [str(_ray_program()), "start", "--head", "--block", f"--port={self.ray_port}"]
        options = [f"--num-cpus={self.cpus}", f"--resources={resources}", f"--object-store-memory={_OBJECT_STORE}"]
        options += ["--include-dashboard=false", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._node = subprocess.Popen(
            [*program, *options], env=environment, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def _await_service(self) -> None:
        until = time.monotonic() + _SECONDS_TO_START
        while time.monotonic() < until:
            if any(process is not None and process.poll() is not None for process in (self._service, self._node)):
                break
            with contextlib.suppress(URLError, OSError), urlopen(f"{self.url}/health", timeout=2):
                return
            time.sleep(0.1)
        self.stop()
        raise UnavailableError(f"The fleet did not start: is another one at ports {self.port} and {self.ray_port}?")

    def wait(self) -> None:
        """Until one of them ends, or Ctrl-C."""
        while all(process is not None and process.poll() is None for process in (self._service, self._node)):
            time.sleep(0.5)

    def stop(self) -> None:
        for process in (self._service, self._node):
            if process is None or process.poll() is not None:
                continue
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            if process.poll() is None:
                process.kill()
        if self._node is not None:  # what Ray's own end left behind is of its session
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._node.pid, signal.SIGKILL)


@contextlib.contextmanager
def running_fleet(store: str, port: int = 8100, ray_port: int = 6379, cpus: int = 1) -> Iterator[LocalFleet]:
    """A one-machine fleet that lives as long as the block."""
    fleet = LocalFleet(store, port, ray_port, cpus)
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.stop()


def _ray_program() -> Path:
    """Ray's own command, beside the package or in the path."""
    import ray

    beside = Path(sys.executable).with_name("ray")
    target = Path(ray.__file__).parent.parent / "bin" / "ray"  # where pip --target puts it
    named = shutil.which("ray")
    for found in (beside, target, Path(named) if named else None):
        if found is not None and found.is_file():
            return found
    raise UnavailableError("Ray's command is not there: pip install 'tilewise-fleet[ray]'")
