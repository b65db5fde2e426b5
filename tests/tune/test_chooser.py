"""The chooser in the backend: cached choices, the model's, and when it leaves the default alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tilewise._extension import native
from tilewise.backend.registry import OptimizedBackend, current_backend
from tilewise.backend.tiled import check_tile, tile_space, tiled_op
from tilewise.store.problem import Problem
from tilewise.tune.choose.cache import ChoiceFile, Decision
from tilewise.tune.choose.scores import ModelScores, as_kernel
from tilewise.tune.search.gaussian_process import Hyperparameters

pytestmark = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
if native is not None:
    from tilewise.tune.choose.chooser import ModelChooser, disable, enable, make_chooser, problem_of, tuned
    from tilewise.tune.choose.tuned_table import key_of
    from tilewise.tune.choose.tuner import Tuner
    from tilewise.tune.families.cpu.family import get_family
    from tilewise.tune.families.cpu.matmul import config_of
    from tilewise.tune.measure.cpu.device import CpuDevice

OWN = ("register_m", "register_n", "pack_a", "pack_b", "threads_m", "threads_n")


class Likes:
    """A model that prefers one register tile, by so much."""

    calibration = None

    def __init__(self, mr: int, lead: float = 1.0) -> None:
        self.mr, self.lead, self.asked = mr, lead, 0

    def score(self, kernel):
        self.asked += 1
        return np.where(kernel.config_feat[:, 24] == self.mr, -self.lead, 0.0).astype(np.float32)


def scores(model) -> ModelScores:
    from tilewise.costmodel.data.schema import TILE_FEATURES

    return ModelScores(model, Hyperparameters(), "test", (*TILE_FEATURES, *OWN))


def near(shape: tuple[int, int, int], threads: int = 1):
    return tiled_op("matmul").quick_candidates(native, shape, "nn", threads)


def some_register_tile() -> int:
    default, *others = near((200, 200, 200), native.num_threads())
    return int(next(row[0] for row in others if row[0] != default[0]))


def test_a_new_shape_gets_the_models_choice_and_is_asked_once():
    model = Likes(some_register_tile())
    chooser = ModelChooser(scores(model))
    tile = chooser("matmul", (200, 200, 200), "float32", "nn")
    assert tile.mr == model.mr
    check_tile("matmul", (200, 200, 200), tile)
    assert chooser("matmul", (200, 200, 200), "float32", "nn") is tile and model.asked == 1
    assert (chooser.ranked_shapes, chooser.replaced_defaults) == (1, 1)


@pytest.mark.parametrize(
    ("shape", "dtype", "layout"),
    [((1, 512, 512), "float32", "nn"), ((300, 300, 300), "float64", "nn"), ((9000, 9000, 9000), "float32", "nn")],
)
def test_the_default_stays_where_tiles_do_not_decide_or_nothing_was_measured(shape, dtype, layout):
    assert ModelChooser(scores(Likes(some_register_tile())))("matmul", shape, dtype, layout) is None


def test_the_default_stays_unless_the_model_expects_more_than_its_own_errors():
    chooser = ModelChooser(scores(Likes(some_register_tile(), lead=0.001)))
    assert chooser("matmul", (200, 200, 200), "float32", "nn") is None


def test_results_do_not_depend_on_the_chooser():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((200, 150), dtype=np.float32), rng.standard_normal((150, 170), dtype=np.float32)
    backend = OptimizedBackend(tile_chooser=ModelChooser(scores(Likes(some_register_tile()))))
    np.testing.assert_allclose(backend.dispatch("matmul", a, b), a @ b, rtol=1e-4, atol=1e-4)
    x, w = rng.standard_normal((2, 3, 9, 9), dtype=np.float32), rng.standard_normal((4, 3, 3, 3), dtype=np.float32)
    plain = OptimizedBackend().dispatch("conv2d", x, w, padding=(1, 1))
    np.testing.assert_allclose(backend.dispatch("conv2d", x, w, padding=(1, 1)), plain, rtol=1e-4, atol=1e-4)


def test_a_tuned_choice_comes_before_the_model(tmp_path: Path):
    threads, bench = native.num_threads(), CpuDevice()
    problem = get_family("matmul").problem({"family": "matmul", "m": 90, "n": 80, "k": 70, "threads": threads})
    tile = tile_space("matmul", (90, 80, 70))[-1]
    ChoiceFile(tmp_path, bench.machine.identity, bench.version).put(
        Decision(problem, config_of(tile), "measured", 1.0, None, 3, True)
    )
    model = Likes(1)
    chooser = ModelChooser(scores(model), ChoiceFile(tmp_path, bench.machine.identity, bench.version))
    assert chooser("matmul", (90, 80, 70), "float32", "nn") == tile and model.asked == 0


def test_a_choice_that_is_not_feasible_any_more_is_not_used(tmp_path: Path):
    from tilewise.store.problem import Config

    bench = CpuDevice()
    problem = get_family("matmul").problem({"family": "matmul", "m": 90, "n": 80, "k": 70})
    nonsense = Config({**config_of(tile_space("matmul", (90, 80, 70), threads=1)[0]), "register_m": 99})
    ChoiceFile(tmp_path, bench.machine.identity, bench.version).put(
        Decision(problem, nonsense, "measured", 1.0, None, 3, True)
    )
    chooser = ModelChooser(scores(Likes(1, 0.0)), ChoiceFile(tmp_path, bench.machine.identity, bench.version))
    assert chooser("matmul", (90, 80, 70), "float32", "nn") is None


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
    own = (*scores(None).columns[24:], "winograd", "threads", "default", "machine_lanes")
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


def test_another_number_of_threads_forgets_what_was_chosen_for_the_old_one():
    model = Likes(some_register_tile())
    chooser = ModelChooser(scores(model))
    chooser("matmul", (200, 200, 200), "float32", "nn")
    before = native.num_threads()
    try:
        native.set_num_threads(2 if before == 1 else 1)
        tile = chooser("matmul", (200, 200, 200), "float32", "nn")
        assert model.asked == 2 and tile.threads_m * tile.threads_n == native.num_threads()
    finally:
        native.set_num_threads(before)


def test_the_tuner_and_the_chooser_take_the_same_tile_unmeasured(tmp_path):
    threads = native.num_threads()
    own, chooser = Tuner("cpu", cache=tmp_path), make_chooser(tmp_path)
    if own.model is None:
        pytest.skip("no model is shipped for this machine's instruction set")
    sources = set()
    for m, n, k in ((64, 64, 64), (48, 300, 70), (200, 200, 200), (17, 900, 33), (600, 600, 600), (8, 8, 8)):
        for layout in ("nn", "nt"):
            spec = {"family": "matmul", "m": m, "n": n, "k": k, "layout": layout, "threads": threads}
            choice, tile = own.choose(spec), chooser("matmul", (m, n, k), "float32", layout)
            assert choice.config == (own.device.configs(choice.problem)[0] if tile is None else config_of(tile))
            assert choice.source == ("default" if tile is None else "model")
            sources.add(choice.source)
    assert "default" in sources
