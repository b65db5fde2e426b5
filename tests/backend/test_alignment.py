"""Where an array lies does not change what is computed from it: a resumed run must repeat the first bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from tilewise.backend import current_backend

RNG = np.random.default_rng(0)


def aligned_copies(x: np.ndarray, offset: int) -> np.ndarray:
    """A copy of `x` that starts `offset` bytes past a cache line."""
    buffer = np.empty(x.nbytes + 128, np.uint8)
    start = -buffer.ctypes.data % 64 + offset
    out = buffer[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    out[...] = x
    return out


@pytest.mark.parametrize("misaligned_index", range(4))
def test_adam_does_not_depend_on_alignment(misaligned_index: int, backend: str) -> None:
    arrays = [RNG.standard_normal(1000).astype(np.float32) for _ in range(4)]
    arrays[3] = np.abs(arrays[3])
    settings = {
        "lr": 1e-2,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "decoupled": True,
    }
    results = []
    for offset in (0, 4, 16, 36, 60):
        parts = [aligned_copies(a, offset if i == misaligned_index else 0) for i, a in enumerate(arrays)]
        current_backend().dispatch("adam_step", *parts, **settings, step=3)
        results.append(np.concatenate(parts))
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@pytest.mark.parametrize("op", ["gelu", "relu", "softmax", "log_softmax", "sum_rows"])
def test_row_operations_do_not_depend_on_alignment(op: str, backend: str) -> None:
    x = RNG.standard_normal((37, 53)).astype(np.float32)
    results = [np.asarray(current_backend().dispatch(op, aligned_copies(x, offset))) for offset in (0, 4, 16, 36, 60)]
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@pytest.mark.parametrize("shape", [(5, 7, 9), (64, 256, 128), (1, 300, 200), (130, 33, 70)])
def test_products_do_not_depend_on_alignment(shape: tuple[int, int, int], backend: str) -> None:
    if backend == "numpy":
        pytest.skip("what NumPy's library does with alignment is its own affair")
    m, k, n = shape
    a, b = RNG.standard_normal((m, k)).astype(np.float32), RNG.standard_normal((n, k)).astype(np.float32)
    run = current_backend().dispatch
    results = [run("matmul", aligned_copies(a, offset), aligned_copies(b, 64 - offset).T) for offset in (4, 16, 36, 60)]
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
