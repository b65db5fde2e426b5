"""The router: what is chosen, why, with which tile, and how that can be changed."""

from __future__ import annotations

import numpy as np
import pytest

from tilewise._extension import native
from tilewise.backend import OptimizedBackend, TileConfig, current_backend, use_backend
from tilewise.errors import ConfigurationError

needs_native = pytest.mark.skipif(native is None, reason="needs the compiled kernels")
A, B = np.ones((40, 30), np.float32), np.ones((30, 50), np.float32)


@needs_native
def test_float32_goes_to_the_native_kernel_and_float64_to_numpy_with_the_reason():
    backend = OptimizedBackend()
    assert backend.explain("matmul", A, B).chosen == "native"
    doubles = backend.explain("matmul", A.astype(np.float64), B.astype(np.float64))
    assert doubles.chosen == "numpy" and "float32" in doubles.passed_over["native"]
    assert backend.dispatch("matmul", A.astype(np.float64), B.astype(np.float64)).dtype == np.float64


@needs_native
def test_the_tile_chooser_is_asked_and_its_tile_is_used():
    asked = []
    lanes = min(nr for _, nr in native.gemm_register_tiles())
    tile = TileConfig(2, lanes, 8, lanes, 5)

    def chooser(*key):
        asked.append(key)
        return tile

    backend = OptimizedBackend(tile_chooser=chooser)
    np.testing.assert_array_equal(backend.dispatch("matmul", A, B), np.full((40, 50), 30, np.float32))
    assert asked == [("matmul", (40, 50, 30), "float32", "nn")]
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
        assert current_backend() is backend and backend.explain("matmul", A, B).chosen == "numpy"
    assert current_backend() is before


def test_an_unknown_operation_or_backend_gets_one_sentence():
    with pytest.raises(ConfigurationError, match="matmul"):
        OptimizedBackend().dispatch("no such operation")
    with pytest.raises(ConfigurationError, match="numpy"), use_backend("no such backend"):
        pass


def test_a_registered_implementation_is_asked_first():
    backend = OptimizedBackend()
    backend.register("matmul", "mine", lambda a, b: "mine", suits=lambda a, b: None if a.shape[0] == 40 else "not 40")
    assert backend.dispatch("matmul", A, B) == "mine"
    assert backend.explain("matmul", A[:3], B).passed_over["mine"] == "not 40"
