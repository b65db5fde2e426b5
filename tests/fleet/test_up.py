"""`tilewise fleet up`: one command, and a campaign, a service and their store are there; Ctrl-C, and they are gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from tests.bench.site import free_port
from tests.fleet.rays import NEEDS_RAY, Driver
from tests.fleet.served import post
from tests.waiting import PATIENCE, interruptible, until
from tilewise._extension import native
from tilewise.store.store import Store


@NEEDS_RAY
@pytest.mark.slow
@pytest.mark.skipif(native is None, reason="the compiled kernels are not installed")
def test_one_machine_measures_answers_and_ends_in_order(tmp_path: Path) -> None:
    port, ray_port, store = free_port(), free_port(), str(tmp_path / "f.sqlite")
    words = ["fleet", "up", "--store", store, "--port", str(port), "--ray-port", str(ray_port)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tilewise.cli.app", *words]
    with interruptible():
        up = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert up.stdout is not None
        assert "the service at" in up.stdout.readline()
        shapes = tmp_path / "shapes.json"
        shapes.write_text(json.dumps([{"family": "matmul", "m": 64 + 8 * i, "n": 96, "k": 64} for i in range(3)]))
        driver = Driver(f"127.0.0.1:{ray_port}", store, shapes, 8)
        assert driver.wait(600) == 0, driver.log.read_text()[-2000:]
        with Store(store) as journal:
            assert journal.counts()["kernels"] == 3
            kernel, machine = journal.kernels()[0], journal.machines()[0]
        device = {"kind": machine.kind, "identity": machine.identity}
        status, answer = post(port, "/choose", {"device": device, "problem": dict(kernel.problem)})
        assert (status, answer["choices"][0]["source"]) == (200, "measured")
        up.send_signal(signal.SIGINT)
        assert up.wait(PATIENCE) == 0
        until(lambda: _is_closed(port), "the end of the service")
    finally:
        if up.poll() is None:
            up.kill()


def _is_closed(port: int) -> bool:
    try:
        post(port, "/choose", {})
    except OSError:
        return True
    return False
