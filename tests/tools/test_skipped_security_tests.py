"""A run without bubblewrap names every security test that it skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_a_run_without_bubblewrap_names_the_tests_that_did_not_run(tmp_path: Path) -> None:
    name = "tests/bench/test_cheats.py::test_the_corpus_is_large"
    words = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "-p", "no:cacheprovider", "-p", "no:xdist", name]
    environment = os.environ | {"PATH": str(tmp_path)}
    run = subprocess.run(words, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    assert "1 SECURITY TESTS DID NOT RUN" in run.stdout
    assert "needs bubblewrap" in run.stdout and name in run.stdout
