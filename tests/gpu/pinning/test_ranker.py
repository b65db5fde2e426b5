"""ConfigRanking unknown kernels by their intermediate representation: counting work, trees, and what cannot fit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewise.errors import FileFormatError
from tilewise.gpu.devices import DEVICES, H200
from tilewise.gpu.pinning.ir import WorkSummary, summarize
from tilewise.gpu.pinning.ranker import KernelRanker, RankedCandidate, Trees, is_too_large, shipped_ranker
from tilewise.io import save

# A product of 64 x 32 tiles along K, as Triton's front end lowers it, shortened; a scale is loaded before the loop.
TTIR = """
module {
  tt.func public @kernel(%a: !tt.ptr<f16>, %K: i32 {tt.divisibility = 16 : i32} loc("a.py":1:1)) {
    %c32_i32 = arith.constant 32 : i32 loc(#loc)
    %c0_i32 = arith.constant 0 : i32
    %c1_i32 = arith.constant 1 : i32
    %zero = arith.constant dense<0.000000e+00> : tensor<64x32xf32>
    %0 = tt.get_program_id x : i32
    %1 = arith.addi %K, %c32_i32 : i32
    %2 = arith.subi %1, %c1_i32 : i32
    %steps = arith.divsi %2, %c32_i32 : i32
    %s = tt.load %p : tensor<32x!tt.ptr<f32>>
    %total:2 = scf.for %i = %c0_i32 to %steps step %c1_i32 iter_args(%x = %zero) -> (tensor<64x32xf32>, f32) {
      %l = tt.load %q, %m, %z : tensor<64x32x!tt.ptr<f16>>
      %r = tt.load %q2 : tensor<32x32x!tt.ptr<f16>>
      %d = tt.dot %l, %r, %x, inputPrecision = tf32 : tensor<64x32xf16> * tensor<32x32xf16> -> tensor<64x32xf32>
      %e = math.exp %d : tensor<64x32xf32>
      %n = "tt.reduce"(%e) <{axis = 1 : i32}> ({
      ^bb0(%u: f32, %v: f32):
        %w = arith.addf %u, %v : f32
        tt.reduce.return %w : f32
      }) : (tensor<64x32xf32>) -> tensor<64xf32>
      scf.yield %e, %y : tensor<64x32xf32>, f32
    } {tt.num_stages = 3 : i32}
    tt.store %o, %total#0 : tensor<64x32x!tt.ptr<f16>>
    tt.return
  }
}
"""


def test_work_is_counted_with_trip_counts_from_the_arguments() -> None:
    work = summarize(TTIR, {"K": 1000})
    assert work.trips == 32
    assert work.loaded_bytes == 32 * 4 + 32 * (64 * 32 + 32 * 32) * 2 and work.first_load_bytes == 128
    assert work.stored_bytes == 64 * 32 * 2 and work.dot_flops == 32 * 2 * 64 * 32 * 32
    assert (work.dot_m, work.dot_n, work.dot_k, work.dot_bits) == (64, 32, 32, 16)
    assert work.special == 32 * 64 * 32 and work.reductions == 32 and work.loop_stages == 3
    assert work.accumulators == 64 * 32 and summarize(TTIR, {}).trips == 8  # without K the trip count is assumed


@pytest.mark.parametrize("text", ["", "}", "}" * 9, "%a = scf.for", "%a = tt.dot %b", "\x00", TTIR[:700]])
def test_text_of_something_else_gives_no_surprise(text: str) -> None:
    try:
        summarize(text, {})
    except (IndexError, ValueError):
        return


def _candidate(block: int, warps: int, stages: int = 3) -> RankedCandidate:
    work = summarize(TTIR, {"K": 4096})
    work.dot_results = work.accumulators = float(block * block)
    work.dot_operand_bytes = float(4 * block * 64)
    return RankedCandidate(work, (4096 // block) ** 2, warps, stages, 1e8)


def test_tiles_that_exceed_registers_or_shared_memory_come_last() -> None:
    ranker = shipped_ranker()
    assert ranker is not None
    candidates = [_candidate(256, 4), _candidate(128, 4), _candidate(128, 8, 9), _candidate(64, 4)]
    assert [is_too_large(candidate, H200) for candidate in candidates] == [True, False, True, False]
    assert set(np.argsort(ranker.scores(candidates, H200))[:2].tolist()) == {1, 3}


def test_scores_are_finite_for_every_device_and_do_not_depend_on_the_order() -> None:
    ranker = shipped_ranker()
    assert ranker is not None
    candidates = [_candidate(block, warps) for block in (16, 32, 64, 128) for warps in (1, 4, 8)]
    for device in DEVICES:
        assert np.isfinite(ranker.scores(candidates, device)).all()
    assert np.array_equal(ranker.scores(candidates, H200)[::-1], ranker.scores(candidates[::-1], H200))
    assert np.isfinite(ranker.scores([RankedCandidate(WorkSummary(), 1, 4, 1, 0.0)], H200)).all()


def test_trees_are_walked_to_their_leaves_and_checked(tmp_path: Path) -> None:
    parts = {"feature": [0, -1, -1], "left": [1, 0, 0], "right": [2, 0, 0], "root": [0]}
    arrays: Any = {f"t.{name}": np.array(values, np.int32) for name, values in parts.items()}
    arrays |= {"t.threshold": np.array([0.5, 0, 0], np.float32), "t.value": np.array([0, 1, 2], np.float32)}
    assert Trees(arrays, "t").predict(np.array([[0.0], [1.0]])).tolist() == [1, 2]
    arrays["t.left"] = np.array([0, 0, 0], np.int32)  # a loop
    with pytest.raises(ValueError, match="in order"):
        Trees(arrays, "t")
    save({"other": np.zeros(3, np.float32)}, tmp_path / "other.safetensors")
    with pytest.raises(FileFormatError, match="not a ranker"):
        KernelRanker(tmp_path / "other.safetensors")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_foreign_kernels_are_lowered_and_described_without_a_gpu() -> None:
    pytest.importorskip("torch")
    from benchmarks.pinned_kernels import CASES
    from tilewise.gpu.pinning.choose import describe_candidates

    for case in CASES[::3]:
        arguments, grid = case.make(case.problems[0], "meta")
        by_name = dict(zip(case.kernel.arg_names, arguments, strict=False))
        (candidate,) = describe_candidates(case.kernel.fn, by_name, case.kernel.configs[:1], grid)
        assert candidate.programs > 1 and candidate.work.loaded_bytes > 0 and candidate.unique_bytes > 0
