"""How a configuration would fill a GPU: checked against counting by hand."""

import math

import numpy as np
import pytest

from tilewise.costmodel.kernel import make_kernel
from tilewise.costmodel.occupancy import Gpu, occupancy
from tilewise.costmodel.rankerfeatures import kernel_sizes
from tilewise.costmodel.schema import TILE_FEATURES, Schema
from tilewise.tune.export import config_row
from tilewise.tune.problem import Config, Problem
from tilewise.tune.triton.family import get_family

OWN = ("warps", "stages", "group")
H200 = Schema((*TILE_FEATURES, *OWN), {"machine": {"multiprocessors": 132}})


def numbers(problem: Problem, config: Config) -> np.ndarray:
    family = get_family(problem.family)
    row = np.array([config_row(family, problem, config, OWN)], np.float32)
    kernel = make_kernel("k", *family.graph(problem), row, np.ones(1, np.int64), np.ones(1, np.int64))
    gpu = Gpu.read(H200)
    assert gpu is not None
    return 2.0 ** occupancy(gpu, kernel, kernel_sizes(kernel), kernel.config_feat.astype(float))[0]


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
    found = numbers(problem, config)
    assert found[0] == pytest.approx(programs)
    assert found[6] == pytest.approx(steps)


def test_the_last_wave_is_wasted_when_one_program_is_left_over():
    config = Config.of(block_m=128, block_n=128, block_k=64, warps=4, stages=3, group=1)  # two fit beside each other
    problem = Problem.of("matmul", dtype="bf16", m=128 * 265, n=128, k=1024, epilogue="none", layout="nt")
    found = numbers(problem, config)
    assert found[4] == 2 and found[1] == 2
    assert found[2] == pytest.approx(2 / (265 / 264))
    assert found[3] == pytest.approx(3 / (265 / 132))
    assert math.isclose(found[8], (128 * 64 + 64 * 128) * 2 * 3)


def test_collections_of_other_hardware_have_no_occupancy():
    assert Gpu.read(Schema()) is None
    assert Gpu.read(Schema((*TILE_FEATURES, "register_m", "threads_m"))) is None
    assert Gpu.read(Schema((*TILE_FEATURES, *OWN), {"machine": {"multiprocessors": "many"}})) is None


@pytest.mark.parametrize(
    ("k", "dtype", "wide"), [(1000, "bf16", 16), (1002, "bf16", 4), (777, "fp16", 2), (777, "tf32", 4)]
)
def test_loads_are_as_wide_as_every_row_allows(k, dtype, wide):
    problem = Problem.of("matmul", dtype=dtype, m=64, n=1024, k=k, epilogue="none", layout="nt")
    found = numbers(problem, Config.of(block_m=64, block_n=64, block_k=32, warps=4, stages=3, group=1))
    assert found[9:].tolist() == [16, wide, 16]


def test_models_from_before_loads_were_told_keep_their_inputs():
    gpu = Gpu.read(H200)
    assert gpu is not None
    before = Gpu.restore(gpu.numbers()[:4])
    assert before is not None and not before.loads and before.width == gpu.width - 3
    assert Gpu.restore(gpu.numbers()) == gpu and Gpu.restore(before.numbers()) == before
