"""The page of names for teachers: every name of the plan stands on it, and every line of it runs and holds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.learn.test_lessons import DOCS, code_of

CALLED = """
matmul_naive matmul_blocked matmul_numpy OptimizedBackend .dispatch INT8Quantizer .quantize_weights calibrate
quantize QuantizedConv2d.from_float QuantizedLinear.from_float MagnitudePruner .prune prune_conv_filters
SparseLinear.from_dense KVCache .update .get CachedAttention .forward generate Timer .measure MemoryProfiler
.profile FLOPCounter .count_ops ProfilerContext TinyMLPerf.events CompetitionSubmission .validate .compute_score
.submit_to_leaderboard .standings benchmark_model compute_speedup
"""
CLAIMS = ("ten to a hundred times", "a quarter of the bytes and less than one point", "less than two points", "linear")


@pytest.mark.parametrize("name", CALLED.split())
def test_a_name_of_the_plan_is_called_on_the_page(name):
    assert f"{name}(" in code_of("modules")


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_of_the_plan_stands_on_the_page(claim):
    assert claim in (DOCS / "modules.md").read_text()


def test_every_line_of_the_page_runs_and_every_claim_holds(tmp_path):
    done = subprocess.run([sys.executable, "-c", code_of("modules")], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 6  # one measured line a module
