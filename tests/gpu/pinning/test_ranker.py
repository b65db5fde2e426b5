"""ConfigRanking unknown kernels by their intermediate representation: counting work, trees, and what cannot fit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewise.errors import FileFormatError
from tilewise.gpu.devices import DEVICES, H200
from tilewise.gpu.pinning.ir import WorkSummary, summarize, with_equal_totals
from tilewise.gpu.pinning.machine_code import MachineWork, machine_features, read_machine_work
from tilewise.gpu.pinning.ranker import KernelRanker, Trees, shipped_ranker
from tilewise.gpu.pinning.work_features import RankedCandidate, is_too_large
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


def test_loop_bounds_may_depend_on_the_grid() -> None:
    text = TTIR.replace("%steps = arith.divsi %2, %c32_i32 : i32", "%steps = tt.get_num_programs y : i32")
    assert summarize(text, {"K": 1000}, (4, 7, 1)).trips == 7


WHILE = """
    %r:2 = scf.while (%a = %c0_i32, %b = %zero) : (i32, tensor<64x32xf32>) -> (i32, tensor<64x32xf32>) {
      %more = arith.cmpi slt, %a, %end : i32
      scf.condition(%more) %a, %b : i32, tensor<64x32xf32>
    } do {
    ^bb0(%a2: i32, %b2: tensor<64x32xf32>):
      %l2 = tt.load %q : tensor<64x32x!tt.ptr<f16>>
      scf.yield %a2, %b2 : i32, tensor<64x32xf32>
    }
    %l3 = tt.load %q : tensor<16x!tt.ptr<f16>>
    tt.return
"""


def test_loops_of_unknown_length_do_the_same_work_in_every_configuration() -> None:
    work = summarize(TTIR.replace("    tt.return\n", WHILE), {"K": 1000})
    assert work.has_unknown_trips and not summarize(TTIR, {"K": 1000}).has_unknown_trips
    # Eight iterations are assumed; the load behind the loop counts once.
    assert work.loaded_bytes == summarize(TTIR, {"K": 1000}).loaded_bytes + 8 * 64 * 32 * 2 + 16 * 2
    small = WorkSummary(dot_flops=100.0, loaded_bytes=10.0, loop_load_bytes=5.0, has_unknown_trips=True)
    large = WorkSummary(dot_flops=400.0, loaded_bytes=30.0, loop_load_bytes=7.0, has_unknown_trips=True)
    first, second = with_equal_totals([small, large], [10, 10])
    assert (first.dot_flops, first.loaded_bytes, first.loop_load_bytes) == (400.0, 40.0, 5.0) and second == large
    assert with_equal_totals([WorkSummary()], [3]) == [WorkSummary()]


# A loop of two blocks with a product, shortened from what Triton writes for a matrix product.
PTX = """
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 a
)
{
	.reg .pred 	%p<3>;
	ld.param.b64 	%rd1, [a];
	@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
$L__BB0_1:
	cp.async.cg.shared.global [ %r5 + 0 ], [ %rd2 + 0 ], 0x10, %r6;
	@%p2 bra 	$L__BB0_2;
	ex2.approx.ftz.f32 	%r7, %r8;
$L__BB0_2:
	wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%f1}, %rd4, %rd5, p, 1, 1, 0, 1;
	bar.sync 	0;
	@%p3 bra 	$L__BB0_1;
	st.global.b16 [ %rd3 + 0 ], { %rs1 };
	ret;
}
	.section	.debug_abbrev
	{
.b8 1
	}
"""


def test_machine_code_is_counted_inside_and_outside_of_loops() -> None:
    work = read_machine_work(PTX, registers=90, spills=0, shared_bytes=4096, layout_conversions=1)
    assert work.loop_depth == 1
    assert work.counts["global_loads"] == (0, 0, 1) and work.counts["global_loads_bytes"] == (0, 0, 16)
    assert work.counts["async_copies"] == work.counts["special"] == work.counts["barriers"] == (1, 0, 0)
    assert work.counts["group_products_operations"] == (2 * 64 * 128 * 16 / 4, 0, 0)
    assert work.counts["global_stores_bytes"] == (2, 0, 0)  # behind the jump, but before the next label
    assert work.executed("barriers", 32) == 32 and work.executed("nothing", 32) == 0
    empty = read_machine_work("", registers=0, spills=0, shared_bytes=0, layout_conversions=0)
    assert empty.loop_depth == 0 and not empty.counts


def test_compiled_candidates_are_ranked_with_finite_scores_on_every_device() -> None:
    ranker = shipped_ranker()
    assert ranker is not None
    candidates = [_candidate(block, warps) for block in (32, 64) for warps in (1, 4)]
    works = [
        read_machine_work(PTX, registers=32 * n, spills=0, shared_bytes=4096 * n, layout_conversions=n)
        for n in range(1, 4)
    ]
    works.append(MachineWork(registers=0, spills=0, shared_bytes=0, layout_conversions=0, loop_depth=0))
    for device in DEVICES:
        assert np.isfinite(machine_features(candidates, works, device)).all()
        assert np.isfinite(ranker.scores(candidates, device, works)).all()


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
