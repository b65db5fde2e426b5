"""Runs the same computation here and in PyTorch and compares results and gradients.

The promise checked everywhere: the largest difference is at most ε · max(1, largest reference value), with ε = 1e-5 in
float32 and 1e-10 in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tilewise import Tensor

EPSILON = {np.dtype(np.float32): 1e-5, np.dtype(np.float64): 1e-10}

torch.set_num_threads(1)


def assert_close(ours: Any, reference: Any, dtype: Any = np.float32, what: str = "result") -> None:
    actual, want = np.asarray(ours), np.asarray(reference)
    assert actual.shape == want.shape, f"{what}: shape {actual.shape}, PyTorch has {want.shape}"
    assert actual.dtype == want.dtype, f"{what}: {actual.dtype}, PyTorch has {want.dtype}"
    if not want.size:
        return
    odd = ~np.isfinite(want)
    np.testing.assert_array_equal(actual[odd], want[odd], err_msg=what)
    assert np.isfinite(actual[~odd]).all(), f"{what}: not finite where PyTorch is"
    scale = max(1.0, float(np.abs(want[~odd]).max(initial=0)))
    worst = float(np.abs(actual[~odd] - want[~odd]).max(initial=0))
    assert worst <= EPSILON[np.dtype(dtype)] * scale, f"{what}: off by {worst:.3g} with values up to {scale:.3g}"


def same_as_torch(
    function: Callable[..., Any],
    arrays: Sequence[np.ndarray],
    reference: Callable[..., Any] | None = None,
    seed: int = 0,
) -> None:
    """Compare function(*tensors) here with reference(*tensors) there: values, then gradients of a random projection."""
    dtype = arrays[0].dtype
    ours_in = [Tensor(a, requires_grad=True) for a in arrays]
    # as_strided keeps a non-contiguous layout; from_numpy alone refuses negative strides, so those are copied
    torch_in = [torch.from_numpy(np.array(a)).requires_grad_() for a in arrays]
    ours = function(*ours_in)
    want = (reference or function)(*torch_in)
    assert_close(ours, want.detach(), dtype)
    weights = np.random.default_rng(seed).standard_normal(ours.shape).astype(dtype)
    ours.backward(weights)
    want.backward(torch.from_numpy(weights))
    for i, (a, b) in enumerate(zip(ours_in, torch_in, strict=True)):
        gradient = np.zeros(a.shape, dtype) if a.grad is None else a.grad
        expected = torch.zeros_like(b) if b.grad is None else b.grad
        assert_close(gradient, expected, dtype, f"gradient of input {i}")
