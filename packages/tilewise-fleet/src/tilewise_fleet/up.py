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
from dataclasses import dataclass
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


@dataclass
class LocalFleet:
    """A one-machine fleet: the addresses of Ray and of the service, and their processes."""

    address: str
    url: str
    processes: list[subprocess.Popen[bytes]]

    def is_running(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def wait(self) -> None:
        """Block until one of the processes ends, or Ctrl-C is pressed."""
        while self.is_running():
            time.sleep(0.5)


@contextlib.contextmanager
def running_fleet(store: str, port: int = 8100, ray_port: int = 6379, cpus: int = 1) -> Iterator[LocalFleet]:
    """Run a one-machine fleet inside the block: Ray on `ray_port`, and the tuning service over `store` on `port`."""
    require_ray()
    Store(store).close()  # creates the store, or raises an error before anything is started
    ray = [str(_ray_program()), "start", "--head", "--block", f"--port={ray_port}", f"--num-cpus={cpus}"]
    ray += [f'--resources={{"{slot_name()}": 1}}', f"--object-store-memory={_OBJECT_STORE_BYTES}"]
    ray += ["--include-dashboard=false", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]
    serve = [sys.executable, "-m", "tilewise.cli.app", "fleet", "serve", "--store", store, "--port", str(port)]
    with _running(ray) as node, _running([*serve, "--no-tokens"]) as service:
        fleet = LocalFleet(f"127.0.0.1:{ray_port}", f"http://127.0.0.1:{port}", [node, service])
        deadline = time.monotonic() + _START_SECONDS
        while not _answers(fleet.url):
            if not fleet.is_running() or time.monotonic() > deadline:
                sentence = f"The fleet did not start; another one may use the ports {port} and {ray_port}."
                raise UnavailableError(sentence)
            time.sleep(0.1)
        yield fleet


def _answers(url: str) -> bool:
    """Tell whether the service at `url` responds to /health within two seconds."""
    with contextlib.suppress(URLError, OSError), urlopen(f"{url}/health", timeout=2):
        return True
    return False


@contextlib.contextmanager
def _running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in its own session inside the block; at the end stop all its processes, by force after 15 s."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=quiet, stderr=quiet)
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # its remaining child processes
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


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
