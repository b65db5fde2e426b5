"""Sparse weights hold what they were given and multiply as the dense matrix does, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest

import tilewise
from tilewise._extension import native

pytestmark = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
RNG = np.random.default_rng(0)
ISAS = native.supported_isas() if native is not None else []
MATRICES = [(1, 1, 0.0), (16, 32, 0.7), (17, 33, 0.9), (100, 70, 0.5), (64, 1000, 0.95), (5, 64, 1.0), (33, 129, 0.0)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_products_equal_the_dense_ones(isa: str, matrix: tuple[int, int, float], threads: int) -> None:
    before, threads_before = native.isa(), tilewise.get_num_threads()
    native.set_isa(isa)
    tilewise.set_num_threads(threads)
    n, k, sparsity = matrix
    w = RNG.standard_normal((n, k)).astype(np.float32)
    w[RNG.random((n, k)) < sparsity] = 0
    bias = RNG.standard_normal(n).astype(np.float32)
    sparse = native.SparseWeights(w, bias)
    for batch in (0, 1, 2, 3, 4, 5, 8, 9, 15, 16, 24, 31, 33, 64, 100, 130):
        x = RNG.standard_normal((batch, k)).astype(np.float32)
        expected = x.astype(np.float64) @ w.T + bias
        limit = 1e-5 * max(1, np.abs(expected).max(initial=0))
        assert np.abs(sparse.multiply(x, False) - expected).max(initial=0) <= limit
        assert np.abs(sparse.multiply(x, True) - np.maximum(expected, 0)).max(initial=0) <= limit
    native.set_isa(before)
    tilewise.set_num_threads(threads_before)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("batch", [1, 2, 4, 5, 8, 24, 40])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.usefixtures("settings_restored")
def test_an_input_that_is_no_number_reaches_only_the_rows_that_have_a_weight_for_it(
    isa: str, batch: int, bad: float
) -> None:
    native.set_isa(isa)
    w = RNG.standard_normal((70, 90)).astype(np.float32)
    w[RNG.random(w.shape) < 0.8] = 0
    x = RNG.standard_normal((batch, 90)).astype(np.float32)
    x[-1, 17] = bad
    out = native.SparseWeights(w).multiply(x, False)
    assert np.isfinite(out[:-1]).all()
    np.testing.assert_array_equal(np.isfinite(out[-1]), w[:, 17] == 0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("batch", [1, 4, 7, 24, 33])
@pytest.mark.usefixtures("settings_restored")
def test_products_are_the_same_bits_at_every_number_of_threads(isa: str, batch: int) -> None:
    native.set_isa(isa)
    w = RNG.standard_normal((1000, 1000)).astype(np.float32)
    w[RNG.random(w.shape) < 0.5] = 0
    sparse, x = native.SparseWeights(w), RNG.standard_normal((batch, 1000)).astype(np.float32)
    results = []
    for threads in (1, 2, 5):
        native.set_num_threads(threads)
        results.append(sparse.multiply(x, False))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.parametrize("matrix", MATRICES)
def test_weights_come_back_as_they_were_given(matrix: tuple[int, int, float]) -> None:
    n, k, sparsity = matrix
    w = RNG.standard_normal((n, k)).astype(np.float32)
    w[RNG.random((n, k)) < sparsity] = 0
    sparse = native.SparseWeights(w)
    np.testing.assert_array_equal(sparse.to_dense(), w)
    assert sparse.nonzeros == np.count_nonzero(w)


def test_at_seventy_percent_the_weights_take_less_than_045_of_the_dense_bytes() -> None:
    w = RNG.standard_normal((512, 512)).astype(np.float32)
    w[RNG.random(w.shape) < 0.7] = 0
    assert native.SparseWeights(w).nbytes <= 0.45 * w.nbytes


def test_wrong_arrays_are_refused() -> None:
    sparse = native.SparseWeights(np.eye(4, dtype=np.float32))
    with pytest.raises(TypeError, match="float32 matrix"):
        native.SparseWeights(np.eye(4))
    with pytest.raises(TypeError, match="bias must be"):
        native.SparseWeights(np.eye(4, dtype=np.float32), np.zeros(3, np.float32))
    for x in (np.zeros((2, 5), np.float32), np.zeros((2, 4)), np.zeros((4, 2), np.float32).T):
        assert sparse.multiply(x, False) is None
