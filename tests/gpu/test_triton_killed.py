"""The whole Triton collector in Triton's interpreter, killed at several moments and started again."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tilewise.store.aggregate import read_measured
from tilewise.store.store import Store
from tilewise.tune.measure.export import make_collection

pytest.importorskip("triton")
pytest.importorskip("torch")
_old_numpy = tuple(map(int, np.__version__.split(".")[:2])) < (2, 4)
pytestmark = pytest.mark.skipif(not _old_numpy, reason="Triton's interpreter needs NumPy before 2.4")

_SOURCE = Path(__file__).parents[2] / "src"
# The GPU process logs every timing that it sends, so that the test can count those that the store lacks.
_COLLECT = """
import os, sys, time
from tilewise.tune import collect
from tilewise.gpu.measure import collector, execution

def serve(connection, kind, shared):
    log = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    class Logging:
        recv = connection.recv
        def send(self, message):
            if message[0] == "timing":
                time.sleep(0.02)  # on a busy machine the collector may wait longer for a core than a timing takes
            connection.send(message)
            if message[0] == "timing":
                os.write(log, b".")
    execution.serve(Logging(), kind, shared)

collector.TritonCollector.serve_gpu = staticmethod(serve)
shapes = [{"family": "softmax", "dtype": "fp32", "rows": 3 + i, "cols": 60} for i in range(2)]
if __name__ == "__main__":
    collect("triton", shapes=shapes, out=sys.argv[1], configs=8, device="interpreter", say=lambda line: None)
"""


def _start(folder: Path) -> subprocess.Popen[str]:
    script = folder / "collecting_script.py"
    script.write_text(_COLLECT)
    environment = {**os.environ, "PYTHONPATH": str(_SOURCE), "TILEWISE_NATIVE": "0"}
    command = [sys.executable, str(script), str(folder / "s.sqlite"), str(folder / "reported")]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def _reported(folder: Path) -> int:
    return (folder / "reported").stat().st_size if (folder / "reported").exists() else 0


def _kill_after(folder: Path, timings: int) -> None:
    child, enough = _start(folder), _reported(folder) + timings
    while child.poll() is None and _reported(folder) < enough:
        time.sleep(0.0005)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()  # returns when the GPU process has closed the pipe too, at its next message


@pytest.mark.slow
def test_a_killed_collection_loses_at_most_one_timing_and_continues(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    for kills, timings in enumerate((1, 9, 17), start=1):
        _kill_after(tmp_path, timings)
        with Store(path) as store:
            stored = store.counts()["timings"]
        assert 0 <= _reported(tmp_path) - stored <= kills
    child = _start(tmp_path)
    _, errors = child.communicate(timeout=600)
    assert child.returncode == 0, errors
    assert "Traceback" not in errors
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    with Store(path) as store:
        kernels = store.kernels()
        assert len(kernels) == len(store.finished()) == len(read_measured(store)) == 2
        for kernel in kernels:
            batches = store.batches(kernel)
            assert not any(batch.open for batch in batches)
            repeats = Counter(key for batch in batches if not batch.disturbed for key in batch.runtime_ns)
            assert len({key for batch in batches for key in batch.runtime_ns}) == 7
            assert not repeats or min(repeats.values()) >= 1
        assert sum(m.kernel.n_configs for members in make_collection(store, "t").splits.values() for m in members) == 16
