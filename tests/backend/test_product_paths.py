"""Every configuration path of a product, by name, against the reference in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tilewise._extension import native
from tilewise.backend.tiled.matmul import TileConfig
from tilewise.errors import ConfigurationError

pytestmark = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
SIZES = [
    (1, 1, 1), (1, 5, 100), (1, 300, 33), (40, 1, 70), (2, 9, 30), (3, 90, 12), (5, 3, 64), (7, 129, 33), (13, 17, 9),
    (16, 2, 300), (4, 1, 90), (70, 4, 21), (8, 16, 130), (300, 6, 40), (66, 49, 70), (6, 700, 90), (130, 3, 65),
]  # fmt: skip


def operands(m: int, n: int, k: int, layout: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([m, n, k])
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    a = a if layout[0] == "n" else np.ascontiguousarray(a.T).T
    return a, b if layout[1] == "n" else np.ascontiguousarray(b.T).T


@pytest.fixture(params=[1, 3])
def threads(request):
    previous = native.num_threads()
    native.set_num_threads(request.param)
    yield request.param
    native.set_num_threads(previous)


@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
def test_every_feasible_path_computes_the_product(isa: str, threads: int):
    previous = native.isa()
    try:
        native.set_isa(isa)
    except Exception:  # not on this machine
        pytest.skip(f"no {isa} here")
    try:
        kernels_used = set()
        for (m, n, k), layout in itertools.product(SIZES, ("nn", "nt", "tn", "tt")):
            a, b = operands(m, n, k, layout)
            bias = np.arange(n, dtype=np.float32)
            exact = a.astype(np.float64) @ b + bias
            paths = native.matmul_paths(a, b)
            assert native.matmul_plan(a, b)[0] in paths
            for path in paths:
                close = np.abs(native.matmul(a, b, path, bias=bias) - exact).max() <= 1e-5 + 3e-6 * k
                assert close, (path, m, n, k, layout)
            kernels_used.update(paths)
        assert len(kernels_used) == 15
    finally:
        native.set_isa(previous)


def test_a_path_that_cannot_compute_a_product_is_refused():
    a, b = operands(66, 49, 70, "nn")
    for path in ("small_m", "column_strips", "no such path"):
        with pytest.raises(ConfigurationError, match="matmul_paths lists them"):
            native.matmul(a, b, path)


@pytest.mark.parametrize("pack_a", [False, True])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_a_tile_is_run_with_and_without_separate_last_columns(layout: str, pack_a: bool):
    lanes = native.gemm_register_tiles()[0][1]
    a, b = operands(66, 2 * lanes + 1, 70, layout)
    tile = TileConfig(mr=4, nr=lanes, mc=20, nc=lanes, kc=30, pack_a=pack_a)
    for last_columns in (0, 1):
        np.testing.assert_allclose(native.matmul(a, b, (tile, last_columns)), a @ b, atol=1e-4)
    for last_columns in (2, lanes):
        with pytest.raises(ConfigurationError, match="cannot be computed separately"):
            native.matmul(a, b, (tile, last_columns))


def test_every_layout_gets_a_feasible_default_tile():
    rng = np.random.default_rng(0)
    for m, n, k in np.exp(rng.uniform(np.log(4), np.log(2500), (60, 3))).astype(int).tolist():
        for layout in ("nn", "nt", "tn", "tt"):
            a, b = operands(m, n, k, layout)
            tile = TileConfig(*native.matmul_plan(a, b)[1])
            assert native.gemm_tile_problem(tile, m, n, k, layout[1] == "t") is None, (m, n, k, layout, tile)
