"""Tuned tiles in the backend: which choices are used, and candidates of an unmeasured choice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tilewise._extension import native
from tilewise.backend.registry import OptimizedBackend, current_backend
from tilewise.backend.tiled import tile_space, tiled_op
from tilewise.store.problem import Problem
from tilewise.tune.choose.cache import ChoiceFile, Decision
from tilewise.tune.choose.scores import as_kernel

pytestmark = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
if native is not None:
    from tilewise.tune.choose.chooser import disable, enable, problem_of, tuned
    from tilewise.tune.choose.tuned_table import key_of
    from tilewise.tune.families.cpu.family import get_family
    from tilewise.tune.families.cpu.matmul import config_of
    from tilewise.tune.measure.cpu.device import CpuDevice

OWN = ("register_m", "register_n", "pack_a", "pack_b", "threads_m", "threads_n")


def near(shape: tuple[int, int, int], threads: int = 1):
    return tiled_op("matmul").quick_candidates(native, shape, "nn", threads)


def test_a_choice_that_is_not_feasible_any_more_is_not_used(tmp_path: Path):
    from tilewise.store.problem import Config

    bench = CpuDevice()
    problem = get_family("matmul").problem({"family": "matmul", "m": 90, "n": 80, "k": 70})
    nonsense = Config({**config_of(tile_space("matmul", (90, 80, 70), threads=1)[0]), "register_m": 99})
    ChoiceFile(tmp_path, bench.machine.identity, bench.version).put(
        Decision(problem, nonsense, "measured", 1.0, None, 3, True)
    )
    with tuned(tmp_path) as table:
        assert not table.tiles and table("matmul", (90, 80, 70), "float32", "nn") is None


def test_a_tuned_tile_is_used_and_a_new_shape_keeps_its_default(tmp_path: Path):
    threads, bench = native.num_threads(), CpuDevice()
    problem = get_family("matmul").problem({"family": "matmul", "m": 90, "n": 80, "k": 70, "threads": threads})
    tile = tile_space("matmul", (90, 80, 70))[-1]
    ChoiceFile(tmp_path, bench.machine.identity, bench.version).put(
        Decision(problem, config_of(tile), "measured", 1.0, None, 3, True)
    )
    with tuned(tmp_path) as table:
        assert table("matmul", (90, 80, 70), "float32", "nn") == tile
        assert table("matmul", (200, 200, 200), "float32", "nn") is None


def test_enable_and_disable_touch_the_backend_in_force_only_while_asked(tmp_path: Path):
    before = current_backend().tile_chooser
    with tuned(tmp_path) as chooser:
        assert current_backend().tile_chooser is chooser
    assert current_backend().tile_chooser is before
    backend = OptimizedBackend()
    assert enable(tmp_path, backend=backend) is backend.tile_chooser
    disable(backend)
    assert backend.tile_chooser is None


def test_candidates_are_few_and_nearly_all_feasible():
    for shape in ((64, 64, 64), (500, 512, 300), (2000, 100, 64), (128, 2000, 768)):
        tiles = near(shape)
        assert 8 <= len(tiles) <= 500
        feasible = [native.gemm_tile_problem(_tile(row), *shape, False) is None for row in tiles]
        assert np.mean(feasible) > 0.5


def _tile(row):
    from tilewise.backend.tiled.matmul import TileConfig

    return TileConfig(*(int(v) for v in row[:5]), bool(row[5]), bool(row[6]), int(row[7]), int(row[8]))


@pytest.mark.parametrize("spec", [
    {"family": "matmul", "m": 50, "n": 60, "k": 70, "layout": "nt"},
    {"family": "conv2d", "batch": 2, "channels": 40, "height": 9, "width": 11, "filters": 33,
     "kernel": 3, "padding": 1},
], ids=lambda spec: spec["family"])  # fmt: skip
def test_the_fast_path_shows_the_model_the_same_kernel_as_the_tuner(spec):
    device, machine = CpuDevice(), {"machine_lanes": 8}
    problem, family = device.problem({**spec, "threads": 1}), get_family(spec["family"])
    own = (*OWN, "winograd", "threads", "default", "machine_lanes")
    tiles = device.candidates(problem)
    fast, slow = (as_kernel(family, problem, some, own, machine) for some in (tiles, list(tiles)))
    np.testing.assert_array_equal(fast.config_feat, slow.config_feat)
    np.testing.assert_array_equal(fast.node_feat, slow.node_feat)
    np.testing.assert_array_equal(fast.edge_index, slow.edge_index)
    assert tiles[0] == device.default(problem) and {*device.configs(problem)} >= {
        config for config in tiles if spec["family"] == "conv2d" and device.runs(problem, config)
    }


def test_shapes_and_problems_go_back_and_forth():
    keys = [
        ("matmul", (3, 4, 5), "float32", "tn"),
        ("conv2d", (2, 3, 16, 16, 8, 3, 3, 1, 1, 1, 1, 1), "float32", "nchw"),
    ]
    for key in keys:
        problem = problem_of(key, 2)
        assert problem is not None and key_of(problem, 2) == key and key_of(problem, 1) is None
    assert problem_of(("conv2d", (2, 4, 16, 16, 8, 3, 3, 1, 1, 1, 1, 2), "float32", "nchw"), 1) is None
    assert key_of(Problem.of("softmax", rows=3, cols=4), 1) is None
