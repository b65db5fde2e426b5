"""Lesson 1 in a real browser: opened from a Jupyter server on this machine and run from top to bottom.

`make test-lessons-browser` installs Jupyter into an environment of its own and runs this.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.bench.site import free_port
from tests.chromium import Browser, find_chromium
from tests.waiting import PATIENCE, until
from tools import notebooks

pytest.importorskip("notebook", reason="Jupyter is not installed; `make test-grading` installs it")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium; Debian's package is `chromium`"),
]
_TOKEN = "lesson"
_RUN_ALL = "jupyterapp.commands.execute('notebook:run-all-cells').then(() => true)"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """A Jupyter server over a folder with the lesson's notebook; gives the notebook's address."""
    shutil.copy(notebooks.FOLDER / "profiling.ipynb", tmp_path)
    port = free_port()
    words = ["--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}", f"--IdentityProvider.token={_TOKEN}"]
    words += [f"--ServerApp.root_dir={tmp_path}", "--expose-app-in-browser"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TILEWISE_CACHE": str(tmp_path / "cache")}
    environment |= {"HOME": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-m", "notebook", *words], env=environment, stderr=subprocess.DEVNULL)
    try:
        until(
            lambda: _answers(f"http://127.0.0.1:{port}/api?token={_TOKEN}"), "the first answer of the notebook server"
        )
        yield f"http://127.0.0.1:{port}/notebooks/profiling.ipynb?token={_TOKEN}"
    finally:
        process.terminate()
        process.wait(PATIENCE)


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError), urlopen(url, timeout=PATIENCE):
        return True
    return False


def test_lesson_1_opens_and_runs_in_a_browser(served: str, tmp_path: Path) -> None:
    cells = [cell for cell in notebooks.notebook("profiling")["cells"] if cell["cell_type"] == "code"]
    with Browser() as browser:
        browser.screen(1200, 900)
        started = time.perf_counter()
        browser.go(served)
        browser.until("typeof jupyterapp !== 'undefined' && !!jupyterapp.shell && !!jupyterapp.shell.currentWidget", 60)
        browser.until("!!(jupyterapp.shell.currentWidget.sessionContext || {}).session")
        seconds = time.perf_counter() - started
        assert browser.js(_RUN_ALL)
        saved = "jupyterapp.commands.execute('docmanager:save').then(() => true)"
        assert browser.js(saved)
        print(f"\nlesson 1 opened in {seconds:.1f} s, ran in {time.perf_counter() - started:.1f} s in all")
        browser.picture(Path(os.environ.get("TILEWISE_PICTURES", str(tmp_path))) / "lesson-1.png")
    document = json.loads((tmp_path / "profiling.ipynb").read_text())
    ran = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in ran for output in cell["outputs"]]
    assert len(ran) == len(cells) and all(cell["execution_count"] for cell in ran)
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert "0 of 3 solved" in json.dumps(outputs)
