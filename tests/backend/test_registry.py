"""The router: what is chosen, why, with which tile, and how that can be changed."""

from __future__ import annotations

import numpy as np
import pytest

from tilewise import Tensor, models
from tilewise._extension import native
from tilewise.backend import OptimizedBackend, TileConfig, current_backend, use_backend
from tilewise.errors import ConfigurationError, ShapeError

needs_native = pytest.mark.skipif(native is None, reason="needs the compiled kernels")
A, B = np.ones((40, 30), np.float32), np.ones((30, 50), np.float32)


@needs_native
def test_float32_goes_to_the_native_kernel_and_float64_to_numpy_with_the_reason():
    backend = OptimizedBackend()
    assert backend.explain("matmul", A, B).implementation == "native"
    doubles = backend.explain("matmul", A.astype(np.float64), B.astype(np.float64))
    assert doubles.implementation == "numpy" and "float32" in doubles.rejected["native"]
    assert backend.dispatch("matmul", A.astype(np.float64), B.astype(np.float64)).dtype == np.float64


@needs_native
def test_the_tile_chooser_is_asked_and_its_tile_is_used():
    keys = []
    lanes = min(nr for _, nr in native.gemm_register_tiles())
    tile = TileConfig(2, lanes, 8, lanes, 5)

    def chooser(*key):
        keys.append(key)
        return tile

    backend = OptimizedBackend(tile_chooser=chooser)
    np.testing.assert_array_equal(backend.dispatch("matmul", A, B), np.full((40, 50), 30, np.float32))
    assert keys == [("matmul", (40, 50, 30), "float32", "nn")]
    assert backend.explain("matmul", A, B).tile == tile
    backend.tile_chooser = lambda *_: TileConfig(2, lanes + 1, 8, 999, 5)
    with pytest.raises(ConfigurationError, match="nr must be"):
        backend.dispatch("matmul", A, B)


@needs_native
def test_a_chooser_that_returns_none_leaves_the_default():
    backend = OptimizedBackend(tile_chooser=lambda *_: None)
    np.testing.assert_array_equal(backend.dispatch("matmul", A, B), OptimizedBackend().dispatch("matmul", A, B))


def test_use_backend_routes_through_numpy_and_puts_the_old_one_back():
    before = current_backend()
    with use_backend("numpy") as backend:
        assert current_backend() is backend and backend.explain("matmul", A, B).implementation == "numpy"
    assert current_backend() is before


def test_an_unknown_operation_or_backend_gets_one_sentence():
    with pytest.raises(ConfigurationError, match="known are adam_step"):
        OptimizedBackend().dispatch("no such operation")
    with pytest.raises(ConfigurationError, match="numpy"), use_backend("no such backend"):
        pass


def test_a_registered_implementation_is_asked_first():
    backend = OptimizedBackend()
    backend.register(
        "matmul", "mine", lambda a, b: "mine", unsupported_reason=lambda a, b: None if a.shape[0] == 40 else "not 40"
    )
    assert backend.dispatch("matmul", A, B) == "mine"
    assert backend.explain("matmul", A[:3], B).rejected["mine"] == "not 40"


@pytest.mark.parametrize("name", ["naive", "blocked"])
def test_a_rung_of_the_ladder_takes_whatever_matmul_takes(name: str):
    rng = np.random.default_rng(0)
    reference = OptimizedBackend(only="numpy")
    shapes = [
        ((3, 4), (4, 5)),
        ((4,), (4, 5)),
        ((3, 4), (4,)),
        ((4,), (4,)),
        ((2, 1, 3, 4), (5, 4, 2)),
        ((0, 3, 4), (4, 2)),
    ]
    with use_backend(name) as backend:
        for left, right in shapes:
            a, b = rng.standard_normal(left).astype(np.float32), rng.standard_normal(right).astype(np.float32)
            assert backend.explain("matmul", a, b).implementation == name
            want = reference.dispatch("matmul", a, b)
            output = backend.dispatch("matmul", a, b)
            assert output.shape == want.shape
            np.testing.assert_allclose(output, want, rtol=1e-5, atol=1e-5)
        options = {"bias": np.ones(50, np.float32), "residual": A @ B, "activation": "relu"}
        want = reference.dispatch("matmul", A, B, **options)
        np.testing.assert_allclose(backend.dispatch("matmul", A, B, **options), want, rtol=1e-4, atol=1e-5)
        assert backend.explain("matmul", A.astype(np.float64), B.astype(np.float64)).implementation == "numpy"
        with pytest.raises(ShapeError):
            backend.dispatch("matmul", np.ones((2, 3, 4), np.float32), np.ones((3, 4, 5), np.float32))


def test_a_named_backend_runs_a_model_with_numpy_for_what_it_lacks():
    model, x = models.mlp(), Tensor(np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32))
    want = np.asarray(model(x))
    for name in ("naive", "blocked", "numpy"):
        with use_backend(name):
            np.testing.assert_allclose(np.asarray(model(x)), want, rtol=1e-4, atol=1e-5)


def test_the_rungs_kept_for_teaching_are_registered_but_never_preferred():
    names = [entry.name for entry in OptimizedBackend().implementations("matmul")]
    assert names[-3:] == ["numpy", "blocked", "naive"]
