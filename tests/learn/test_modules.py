"""The page of names for teachers: every name of the plan stands on it, and every line of it runs and holds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.learn.test_lessons import DOCS, code_of

NAMES = """
matmul_naive matmul_blocked matmul_numpy OptimizedBackend INT8Quantizer calibrate QuantizedConv2d QuantizedLinear
MagnitudePruner prune_conv_filters SparseLinear KVCache CachedAttention Timer MemoryProfiler FLOPCounter ProfilerContext
TinyMLPerf CompetitionSubmission benchmark_model compute_speedup submit_to_leaderboard
"""


@pytest.mark.parametrize("name", NAMES.split())
def test_a_name_of_the_plan_is_in_the_code_of_the_page_or_its_text(name):
    assert name in (DOCS / "modules.md").read_text()


def test_every_line_of_the_page_runs_and_every_claim_holds(tmp_path):
    done = subprocess.run([sys.executable, "-c", code_of("modules")], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 6  # one measured line a module
