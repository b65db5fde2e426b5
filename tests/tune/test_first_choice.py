"""The network behind the unmeasured choice: what it reads, what it may answer, and who asks it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tilewise._extension import native
from tilewise.backend import matmul_native
from tilewise.backend.tiles import TileConfig
from tilewise.errors import FileFormatError, UnavailableError
from tilewise.io import save

pytestmark = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
if native is not None:
    from tilewise.tune.chooser import make_chooser
    from tilewise.tune.cpu.bench import CpuBench
    from tilewise.tune.cpu.family import get_family
    from tilewise.tune.cpu.first import (
        SHIPPED,
        WORTH_THREADS,
        FirstChoice,
        Product,
        candidates,
        features,
        plan_of,
        read_first_choice,
        tile_at,
    )
    from tilewise.tune.tuner import Tuner

    fits = native.isa() == "avx512"
else:
    fits = False
needs_the_shipped = pytest.mark.skipif(not fits, reason="the shipped network is of another instruction set")
SHAPES = [(4, 700, 37), (333, 23, 166), (61, 61, 61), (17, 255, 613), (500, 5, 100), (97, 1000, 13)]


def network(likes: float = 0.0, margin: float = 0.01, width: int | None = None) -> FirstChoice:
    """One that says of every tile that its time is exp(likes) of the default's."""
    size = width or features(Product(9, 9, 99, "nn", "tiled"), np.array([[6, 64, 60, 64, 64, 0, 0, 1, 1]])).shape[1]
    zeros = {"w0": (1, size, 2), "b0": (1, 2), "w1": (1, 2, 2), "b1": (1, 2), "w2": (1, 2)}
    arrays = {name: np.zeros(shape, np.float32) for name, shape in zeros.items()}
    arrays |= {"mean": np.zeros(size, np.float32), "deviation": np.ones(size, np.float32)}
    return FirstChoice(arrays | {"b2": np.array([likes], np.float32)}, margin, 1.0, 10**7)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_every_tile_of_every_product_has_finite_features(shape, layout):
    p, default = plan_of(native, *shape, layout)
    tiles = np.vstack([default, candidates(native, *shape, 1)])
    x = features(p, tiles)
    assert x.shape[0] == len(tiles) and np.isfinite(x).all()


def test_the_default_stays_unless_more_than_the_margin_is_promised():
    assert network(-0.02).choose(native, 100, 100, 100, "nn") is not None
    assert network(-0.005).choose(native, 100, 100, 100, "nn") is None
    assert network(0.3).choose(native, 100, 100, 100, "nn") is None


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_whatever_is_chosen_can_be_used_and_gives_the_product(layout):
    rng = np.random.default_rng(0)
    for m, n, k in SHAPES:
        tile = network(-1.0).choose(native, m, n, k, layout)
        a = rng.standard_normal((k, m) if layout[0] == "t" else (m, k), dtype=np.float32)
        b = rng.standard_normal((n, k) if layout[1] == "t" else (k, n), dtype=np.float32)
        a, b = a.T if layout[0] == "t" else a, b.T if layout[1] == "t" else b
        np.testing.assert_allclose(matmul_native(a, b, tile), a @ b, atol=1e-3)


def test_only_products_like_those_measured_are_covered():
    model = network()
    assert model.covers(10**6, 1) and model.covers(10**6, 2) and not model.covers(10**7 + 1, 1)
    assert not model.covers(WORTH_THREADS, 2), "several threads share larger ones, and that was not measured"


def test_a_network_survives_its_file(tmp_path: Path):
    model = network(-0.25, margin=0.125)
    model.write(tmp_path / "x.safetensors", {"date": "today"})
    again = read_first_choice(tmp_path / "x.safetensors")
    assert (again.margin, again.share, again.most_work) == (0.125, 1.0, 10**7)
    p, _ = plan_of(native, 50, 60, 70, "nt")
    x = features(p, candidates(native, 50, 60, 70, 1))
    np.testing.assert_array_equal(again.predict(x), model.predict(x))


def test_a_file_that_is_no_such_network_gets_one_sentence(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(UnavailableError):
        read_first_choice(path)
    save({"a": np.zeros(3, np.float32)}, path)
    with pytest.raises(FileFormatError, match="not a chooser's network"):
        read_first_choice(path)
    network(width=7).write(path, {})
    with pytest.raises(FileFormatError, match="not a chooser's network"):
        read_first_choice(path)
    path.write_bytes(b"nothing")
    with pytest.raises(FileFormatError):
        read_first_choice(path)


@needs_the_shipped
def test_the_shipped_network_chooses_the_same_every_time_and_sometimes_the_default():
    model = read_first_choice(SHIPPED)
    rng = np.random.default_rng(1)
    shapes = [tuple(int(x) for x in rng.integers(20, 300, 3)) for _ in range(30)]
    found = [model.choose(native, *shape, "nn") for shape in shapes]
    assert found == [model.choose(native, *shape, "nn") for shape in shapes]
    assert 0 < sum(tile is None for tile in found) < len(found)


@needs_the_shipped
def test_the_chooser_and_the_tuner_say_the_same_of_a_product(tmp_path: Path):
    native.set_num_threads(1)
    chooser, tuner = make_chooser(tmp_path), Tuner(cache=tmp_path)
    for m, n, k in SHAPES:
        tile = chooser("matmul", (m, n, k), "float32", "nn")
        tuned = tuner.choose({"family": "matmul", "m": m, "n": n, "k": k})
        if tile is None:
            assert tuned.source == "default"
        else:
            assert tuned.source == "model" and tile == TileConfig(**_fields(tuned.config))


def _fields(config) -> dict[str, int]:
    from tilewise.tune.cpu.matmul import tile_of

    return tile_of(config).as_dict()


def test_a_model_of_ones_own_is_not_overruled(tmp_path: Path):
    from tilewise.costmodel.shipped import shipped_file

    assert make_chooser(tmp_path, shipped_file("cpu")).first is None
    assert (make_chooser(tmp_path).first is not None) == (CpuBench().first is not None) == fits


def test_the_default_is_measured_as_it_runs_without_a_tile():
    """Inner products, here: the default tile, passed as a tile, would run the tiled loops."""
    family = get_family("matmul")
    problem = family.problem({"family": "matmul", "m": 90, "n": 6, "k": 691, "layout": "nt"})
    operands = family.operands(problem, np.random.default_rng(0))
    assert native.matmul_plan(operands["a"], operands["b"], 1)[0] != "tiled"
    default, *others = family.configs(problem)
    got = family.runner(problem, default, operands)()
    np.testing.assert_array_equal(got, matmul_native(operands["a"], operands["b"]))
    tiled = family.runner(problem, others[0], operands)()
    np.testing.assert_array_equal(tiled, matmul_native(operands["a"], operands["b"], TileConfig(**_fields(others[0]))))


def test_a_tile_that_was_read_beforehand_is_the_tile():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((60, 40), dtype=np.float32), rng.standard_normal((40, 50), dtype=np.float32)
    tile = tile_at(candidates(native, 60, 50, 40, 1)[0])
    np.testing.assert_array_equal(matmul_native(a, b, native.prepared_tile(tile)), matmul_native(a, b, tile))
