"""Every rung of the ladder gives the same product."""

from __future__ import annotations

import numpy as np
import pytest

from tilewise._extension import native
from tilewise.backend import ladder as ladder_module
from tilewise.backend import matmul_blocked, matmul_naive
from tilewise.backend.ladder import PEER, RUNGS
from tilewise.errors import ConfigurationError, DtypeError, ShapeError

RNG = np.random.default_rng(0)
SHAPES = [(0, 3, 2), (1, 1, 1), (3, 0, 4), (2, 7, 5), (17, 33, 13), (64, 64, 64), (65, 300, 70)]


def close(result: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    expected = a.astype(np.float64) @ b.astype(np.float64)
    assert result.shape == expected.shape and result.dtype == np.float32
    assert np.abs(result - expected).max(initial=0) <= 1e-5 * max(1, np.abs(expected).max(initial=0))


@pytest.mark.parametrize("rung", [*RUNGS, PEER], ids=lambda r: r.name)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_rung_gives_the_product(rung, shape: tuple[int, int, int]) -> None:
    if native is None and rung.name not in ("python", "blocked", "numpy"):
        pytest.skip("the compiled kernels are not built")
    m, k, n = shape
    a, b = RNG.standard_normal((m, k)).astype(np.float32), RNG.standard_normal((k, n)).astype(np.float32)
    close(rung.run(a, b), a, b)
    close(rung.run(np.asfortranarray(a), b[:, ::-1]), a, b[:, ::-1])


@pytest.mark.parametrize("block", [1, 7, 64, 1000, (8, 16, 4), (1, 100, 3)])
def test_blocks_of_any_size_are_right_with_and_without_the_compiled_kernels(block, monkeypatch) -> None:
    a, b = RNG.standard_normal((33, 50)).astype(np.float32), RNG.standard_normal((50, 41)).astype(np.float32)
    close(matmul_blocked(a, b, block), a, b)
    monkeypatch.setattr(ladder_module, "native", None)
    close(matmul_blocked(a, b, block), a, b)


def test_not_a_number_and_infinity_pass_through() -> None:
    a, b = np.ones((3, 3), np.float32), np.ones((3, 3), np.float32)
    a[0, 0], b[2, 2] = np.nan, np.inf
    expected = a @ b
    for rung in RUNGS[: None if native is not None else 1]:
        np.testing.assert_array_equal(rung.run(a, b), expected)


def test_bad_arguments_get_a_sentence() -> None:
    with pytest.raises(ShapeError, match="cannot be multiplied"):
        matmul_naive(np.ones((2, 3)), np.ones((2, 3)))
    with pytest.raises(DtypeError, match="real numbers"):
        matmul_blocked(np.ones((2, 2), complex), np.ones((2, 2)))
    for block in (0, -3, (1, 2), 2.5, (1, 2, 0)):
        with pytest.raises((ConfigurationError, TypeError)):
            matmul_blocked(np.ones((2, 2)), np.ones((2, 2)), block)
