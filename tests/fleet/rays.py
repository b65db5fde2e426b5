"""Small Ray clusters for tests: nodes on this machine with a slot each, little memory and no dashboard."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import interruptible

NEEDS_RAY = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed; `make test-fleet` installs it"
)
_MEMORY = 80 << 20


@contextmanager
def cluster_of(nodes: int, slot: str = "cpu:test", cpus: int = 0) -> Iterator[Any]:
    """A head and so many nodes beside it, each with one slot; the head has none."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    from ray.cluster_utils import Cluster

    plain = {"num_cpus": cpus, "object_store_memory": _MEMORY}
    cluster = Cluster(initialize_head=True, head_node_args={**plain, "num_cpus": 0, "include_dashboard": False})
    try:
        cluster.nodes = [cluster.add_node(**plain, resources={slot: 1}) for _ in range(nodes)]
        yield cluster
    finally:
        import ray

        ray.shutdown()
        cluster.shutdown()


class Driver:
    """`tilewise collect cpu --ray` in a process of its own."""

    def __init__(self, address: str, store: str, shapes: Path, configs: int, minutes: float = 20.0) -> None:
        words = ["--ray", address, "--store", store, "--shapes", str(shapes), "--configs", str(configs)]
        command = [
            sys.executable,
            "-m",
            "tilewise.cli.app",
            "collect",
            "cpu",
            *words,
            "--minutes",
            str(minutes),
            "--json",
        ]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        self.log = shapes.with_name(f"driver-{time.monotonic_ns()}.log")
        with self.log.open("wb") as out, interruptible():
            self.process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)

    def events(self) -> list[dict[str, Any]]:
        lines = self.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def measured_events(self) -> list[str]:
        """The kernels that it saw finished."""
        steps = [event for event in self.events() if event["event"] == "measured"]
        return [kernel["name"] for event in steps for kernel in event["kernels"] if kernel["finished"]]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def wait(self, seconds: float) -> int:
        return self.process.wait(seconds)
