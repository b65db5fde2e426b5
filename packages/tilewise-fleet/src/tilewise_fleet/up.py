"""`tilewise fleet up`: a fleet on one machine, to try it out: a local Ray with one slot, a store and a service.

All processes are children of this one and end with it. docs/fleet.md describes a fleet of several machines.
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

_START_SECONDS = 60.0  # arbitrary; a start takes a few seconds
_OBJECT_STORE_BYTES = 100 << 20  # close to Ray's minimum; kernels and results are small


def slot_name() -> str:
    """Return the resource name of this machine's slot: cpu and its instruction set."""
    from tilewise._extension import native

    return f"cpu:{'portable' if native is None else native.isa()}"


class LocalFleet:
    """The processes of a one-machine fleet."""

    def __init__(self, store: str, port: int, ray_port: int, cpus: int) -> None:
        require_ray()
        Store(store).close()  # creates the store, or raises an error before anything is started
        self.store, self.port, self.ray_port, self.cpus = store, port, ray_port, cpus
        self.address, self.url = f"127.0.0.1:{ray_port}", f"http://127.0.0.1:{port}"
        self._service: subprocess.Popen[bytes] | None = None
        self._node: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start Ray and the service, and wait until the service answers."""
        self._start_ray()
        serve = ["fleet", "serve", "--store", self.store, "--port", str(self.port), "--no-tokens"]
        self._service = subprocess.Popen([sys.executable, "-m", "tilewise.cli.app", *serve], stdout=subprocess.DEVNULL)
        self._await_service()

    def _start_ray(self) -> None:
        """Start the head node of a Ray cluster that offers one CPU slot."""
        resources = f'{{"{slot_name()}": 1}}'
        program = [str(_ray_program()), "start", "--head", "--block", f"--port={self.ray_port}"]
        options = [
            f"--num-cpus={self.cpus}",
            f"--resources={resources}",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
        ]
        options += ["--include-dashboard=false", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._node = subprocess.Popen(
            [*program, *options], env=environment, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def _await_service(self) -> None:
        """Wait until the service answers; stop everything if one of the processes ends or the time is up."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if any(process is not None and process.poll() is not None for process in (self._service, self._node)):
                break
            with contextlib.suppress(URLError, OSError), urlopen(f"{self.url}/health", timeout=2):
                return
            time.sleep(0.1)
        self.stop()
        raise UnavailableError(
            f"The fleet did not start; another one may use the ports {self.port} and {self.ray_port}."
        )

    def wait(self) -> None:
        """Wait until one of the processes ends, or for Ctrl-C."""
        while all(process is not None and process.poll() is None for process in (self._service, self._node)):
            time.sleep(0.5)

    def stop(self) -> None:
        """End both processes, by force if they take more than 15 s each."""
        for process in (self._service, self._node):
            if process is None or process.poll() is not None:
                continue
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            if process.poll() is None:
                process.kill()
        if self._node is not None:  # processes that Ray left behind belong to its session
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._node.pid, signal.SIGKILL)


@contextlib.contextmanager
def running_fleet(store: str, port: int = 8100, ray_port: int = 6379, cpus: int = 1) -> Iterator[LocalFleet]:
    """Run a fleet on this machine for the duration of a `with` block."""
    fleet = LocalFleet(store, port, ray_port, cpus)
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.stop()


def _ray_program() -> Path:
    """Find the `ray` command next to the interpreter, in Ray's installation, or on the path."""
    import ray

    beside = Path(sys.executable).with_name("ray")
    target = Path(ray.__file__).parent.parent / "bin" / "ray"  # where pip --target puts it
    on_path = shutil.which("ray")
    for program in (beside, target, Path(on_path) if on_path else None):
        if program is not None and program.is_file():
            return program
    raise UnavailableError("The command `ray` is missing: pip install 'tilewise-fleet[ray]'")
