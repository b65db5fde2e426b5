"""gradcheck: compare the gradients of a function with finite differences, in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilewise.errors import DtypeError, GradientError
from tilewise.tensor import Tensor, no_grad


def gradcheck(
    function: Callable[..., Tensor], *inputs: Tensor, eps: float = 1e-6, atol: float = 1e-6, rtol: float = 1e-4
) -> bool:
    """Return True if every gradient of `function(*inputs)` agrees with central differences; else raise GradientError.

    >>> gradcheck(lambda x: x.exp().sum(), Tensor([0.5, 1.0], requires_grad=True, dtype="float64"))
    True
    """
    if any(t.requires_grad and t.dtype != np.float64 for t in inputs):
        raise DtypeError("gradcheck needs float64 inputs: finite differences in float32 are mostly rounding error")
    for t in inputs:
        t.grad = None
    out = function(*inputs)
    weights = np.random.default_rng(0).standard_normal(out.shape)  # one random projection checks all outputs at once
    out.backward(weights)
    for i, t in enumerate(inputs):
        if t.requires_grad:
            _check_input_gradient(function, inputs, i, weights, eps=eps, atol=atol, rtol=rtol)
    return True


@no_grad()
def _check_input_gradient(
    function: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    i: int,
    weights: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    *,
    eps: float,
    atol: float,
    rtol: float,
) -> None:
    """Compare input `i`'s gradient with central differences; raise GradientError at the first that differs."""
    t = inputs[i]
    gradient = np.zeros(t.shape) if t.grad is None else t.grad.data
    for position in np.ndindex(t.shape):
        value = t.data[position]
        sides = []
        for offset in (eps, -eps):
            t.data[position] = value + offset
            sides.append(float((function(*inputs).data * weights).sum()))
        t.data[position] = value
        expected = (sides[0] - sides[1]) / (2 * eps)
        if abs(expected - gradient[position]) > atol + rtol * abs(expected):
            raise GradientError(
                f"the gradient of input {i} at {position} is {gradient[position]:.6g}, "
                f"finite differences give {expected:.6g}"
            )
