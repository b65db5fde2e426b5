"""How a configuration would fill a GPU: checked against counting by hand."""

import math

import numpy as np
import pytest

from tilewise.costmodel.data.kernel import make_kernel
from tilewise.costmodel.data.schema import TILE_FEATURES, Schema
from tilewise.costmodel.features.occupancy import Gpu, occupancy_features
from tilewise.costmodel.features.ranker import kernel_sizes
from tilewise.costmodel.features.ranker_fit import gpu_of
from tilewise.gpu.families.family import get_family
from tilewise.store.problem import Config, Problem
from tilewise.tune.families.space import config_row

OWN = ("warps", "stages", "group")
H200 = Schema((*TILE_FEATURES, *OWN), {"machine": {"multiprocessors": 132}})


def numbers(problem: Problem, config: Config) -> np.ndarray:
    family = get_family(problem.family)
    row = np.array([config_row(family, problem, config, OWN)], np.float32)
    kernel = make_kernel("k", *family.graph(problem), row, np.ones(1, np.int64), np.ones(1, np.int64))
    gpu = gpu_of(H200)
    assert gpu is not None
    return 2.0 ** occupancy_features(gpu, kernel, kernel_sizes(kernel), kernel.config_feat)[:, 0]


@pytest.mark.parametrize(
    ("problem", "config", "programs", "steps"),
    [
        (
            Problem.of("matmul", dtype="bf16", m=1000, n=4096, k=1024, epilogue="bias", layout="nt"),
            Config.of(block_m=128, block_n=256, block_k=64, warps=8, stages=3, group=8),
            8 * 16, 16,
        ),
        (
            Problem.of("batched_matmul", dtype="tf32", batch=6, m=100, n=64, k=32, epilogue="none", layout="nn"),
            Config.of(block_m=32, block_n=64, block_k=16, warps=4, stages=2, group=1),
            6 * 4, 2,
        ),
        (
            Problem.of("attention", dtype="bf16", batch=2, heads=8, kv_heads=2, queries=500, keys=512, head=64,
                       causal=1),
            Config.of(block_m=128, block_n=64, warps=4, stages=3),
            2 * 8 * 4, 8,
        ),
        (
            Problem.of("softmax", dtype="bf16", rows=1001, cols=3000),
            Config.of(block_rows=4, block_cols=1024, warps=4, stages=1),
            251, 3,
        ),
        (
            Problem.of("reduction", dtype="fp32", rows=3000, cols=1000, axis=0, operation="sum"),
            Config.of(block_rows=64, block_cols=128, warps=4, stages=1),
            8, 47,
        ),
    ],
)  # fmt: skip
def test_programs_and_loop_steps_are_those_of_the_launch(problem, config, programs, steps):
    values = numbers(problem, config)
    assert values[0] == pytest.approx(programs)
    assert values[6] == pytest.approx(steps)


def test_the_last_wave_is_wasted_when_one_program_is_left_over():
    config = Config.of(block_m=128, block_n=128, block_k=64, warps=4, stages=3, group=1)  # two fit beside each other
    problem = Problem.of("matmul", dtype="bf16", m=128 * 265, n=128, k=1024, epilogue="none", layout="nt")
    values = numbers(problem, config)
    assert values[4] == 2 and values[1] == 2
    assert values[2] == pytest.approx(2 / (265 / 264))
    assert values[3] == pytest.approx(3 / (265 / 132))
    assert math.isclose(values[8], (128 * 64 + 64 * 128) * 2 * 3)


def test_collections_of_other_hardware_have_no_occupancy():
    assert gpu_of(Schema()) is None
    assert gpu_of(Schema((*TILE_FEATURES, "register_m", "threads_m"))) is None
    assert gpu_of(Schema((*TILE_FEATURES, *OWN), {"machine": {"multiprocessors": "many"}})) is None


TILE = Config.of(block_m=64, block_n=128, block_k=32, warps=4, stages=3, group=1)


@pytest.mark.parametrize(
    ("k", "dtype", "wide"), [(1000, "bf16", 16), (1002, "bf16", 4), (777, "fp16", 2), (777, "tf32", 4)]
)
def test_loads_are_as_wide_as_every_row_allows(k, dtype, wide):
    problem = Problem.of("matmul", dtype=dtype, m=64, n=1024, k=k, epilogue="none", layout="nn")
    assert numbers(problem, TILE)[9:12].tolist() == [16, wide, 16]


@pytest.mark.parametrize("family", ["matmul", "batched_matmul"])
@pytest.mark.parametrize("dtype", ["bf16", "tf32"])
@pytest.mark.parametrize(("layout", "rows"), [("nn", "kn"), ("nt", "kk"), ("tn", "mn"), ("tt", "mk")])
def test_rows_of_transposed_operands_are_those_in_memory(family, dtype, layout, rows):
    sizes = {"m": 66, "n": 1024, "k": 777}
    batch = {"batch": 3} if family == "batched_matmul" else {}
    problem = Problem.of(family, dtype=dtype, epilogue="none", layout=layout, **sizes, **batch)
    element = 2 if dtype == "bf16" else 4
    wide = {"m": 2 * element, "n": 16, "k": element}
    assert numbers(problem, TILE)[9:12].tolist() == [16, wide[rows[0]], wide[rows[1]]]


def test_an_operand_that_cannot_be_copied_ahead_has_one_buffer():
    narrow = Problem.of("matmul", dtype="bf16", m=64, n=1024, k=777, epilogue="none", layout="nn")
    assert numbers(narrow, TILE)[8] == pytest.approx((64 * 32 + 32 * 128 * 3) * 2)
    both = Problem.of("matmul", dtype="bf16", m=64, n=1023, k=777, epilogue="none", layout="nn")
    assert numbers(both, TILE)[8] == pytest.approx((64 * 32 + 32 * 128) * 2)
    copied = Problem.of("matmul", dtype="bf16", m=64, n=1024, k=778, epilogue="none", layout="nn")
    assert numbers(copied, TILE)[8] == pytest.approx((64 * 32 + 32 * 128) * 2 * 3)


def test_programs_that_need_less_shared_memory_are_resident_together():
    config = Config.of(block_m=128, block_n=128, block_k=64, warps=4, stages=4, group=1)
    problem = Problem.of("matmul", dtype="bf16", m=12800, n=1023, k=777, epilogue="none", layout="nn")
    features = numbers(problem, config)
    assert features[4] == pytest.approx(3)  # 32 KiB, and registers leave room for three
    assert features[1] == pytest.approx(math.ceil(800 / 396))


def test_load_and_store_instructions_are_those_of_a_thread():
    problem = Problem.of("matmul", dtype="bf16", m=640, n=1022, k=777, epilogue="none", layout="nn")
    values = numbers(problem, TILE)
    a_step = 64 * 32 / 128, 32 * 128 / 128 / 2
    assert values[12:15] == pytest.approx([*a_step, 64 * 128 / 128 / 2])
    steps, own = 25, values[1] * values[4]
    assert values[15] == pytest.approx(sum(a_step) * 4 * steps * own)


def test_a_thread_has_at_least_one_load():
    problem = Problem.of("matmul", dtype="bf16", m=64, n=1024, k=1024, epilogue="none", layout="nn")
    values = numbers(problem, Config.of(block_m=16, block_n=16, block_k=16, warps=8, stages=3, group=1))
    assert values[12:15].tolist() == [1, 1, 1]


def test_reductions_load_what_they_hold_and_nothing_else():
    problem = Problem.of("reduction", dtype="fp32", rows=3000, cols=1001, axis=0, operation="sum")
    values = numbers(problem, Config.of(block_rows=64, block_cols=128, warps=4, stages=1))
    assert values[12:15].tolist() == [64, 1, 1]
    assert values[15] == pytest.approx(64 * 4 * 47 * values[1] * values[4])


@pytest.mark.parametrize(
    ("layout", "sizes", "lines", "sectors"),
    [
        ("nn", (640, 1024, 1024), (1, 1, 1), (1, 1)),  # every row begins with a line
        ("nn", (640, 1000, 1048), (1 + 112 / 256, 1 + 112 / 64, 1 + 112 / 256), (1 + 16 / 64, 1 + 16 / 256)),
        ("nt", (640, 1032, 777), (1 + 112 / 256, 1 + 126 / 64, 1 + 126 / 64), (1 + 30 / 64, 1 + 30 / 64)),
        ("tn", (96, 1024, 777), (1, 1 + 64 / 128, 1), (1, 1)),
    ],
)
def test_stretches_of_a_tile_that_begin_within_a_line_touch_more_than_they_hold(layout, sizes, lines, sectors):
    m, n, k = sizes
    problem = Problem.of("matmul", dtype="bf16", m=m, n=n, k=k, epilogue="none", layout=layout)
    assert numbers(problem, TILE)[18:] == pytest.approx([*lines, *sectors])  # stretches of 128, 32 or 64 numbers


def test_a_reduction_touches_lines_of_what_it_reads():
    problem = Problem.of("reduction", dtype="fp32", rows=3000, cols=1001, axis=1, operation="sum")
    values = numbers(problem, Config.of(block_rows=8, block_cols=128, warps=4, stages=1))
    assert values[19:] == pytest.approx([1 + 124 / 512, 1, 1 + 28 / 512, 1])


def test_numbers_of_an_unknown_kind_are_not_read_as_a_gpu():
    gpu = Gpu(132.0, 232_448.0, 24, 25)
    assert Gpu.from_array(gpu.to_array()) == gpu
    gpu_numbers = gpu.to_array().tolist()[:4]
    for own in ([], [0.0], [4.0], [1.5], [float("nan")], [1.0, 2.0]):
        assert Gpu.from_array(np.array([*gpu_numbers, *own])) is None
    assert Gpu.from_array(np.zeros(0)) is None


@pytest.mark.parametrize(
    ("layout", "together"), [("nn", (32, 128)), ("nt", (32, 32)), ("tn", (64, 128)), ("tt", (64, 32))]
)
def test_what_lies_together_of_a_tile_follows_the_layout(layout, together):
    problem = Problem.of("matmul", dtype="bf16", m=640, n=1024, k=768, epilogue="none", layout=layout)
    assert numbers(problem, TILE)[16:18] == pytest.approx([2 * size for size in together])


def test_a_call_of_a_library_has_no_tile_and_finite_numbers():
    problem = Problem.of("matmul", dtype="bf16", m=64, n=64, k=64, epilogue="none", layout="nn")
    family, gpu = get_family("matmul"), gpu_of(H200)
    assert gpu is not None
    row = np.zeros((1, len(H200.config_features)), np.float32)
    kernel = make_kernel("k", *family.graph(problem), row, np.ones(1, np.int64), np.ones(1, np.int64))
    assert np.isfinite(occupancy_features(gpu, kernel, kernel_sizes(kernel), kernel.config_feat)).all()
