"""Wanda scores (Sun et al. 2023): the magnitude of a weight times the norm of the input it multiplies.

A small weight matters if its input is large. The norms come from a few batches, without training. Scores are compared
within each output, because inputs of different layers have different scales.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise import nn
from tilewise.errors import ConfigurationError
from tilewise.nn import Module
from tilewise.tensor import Tensor, enable_grad

Array = npt.NDArray[Any]


def input_norms(model: Module, batches: Iterable[Any]) -> dict[str, Array]:
    """Run batches through a model and return the L2 norm of each weight's input channels, (in,), by parameter name."""
    observed = copy.deepcopy(model).eval()
    squares: dict[str, Array] = {}
    for name, module in observed.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            _observe(module, f"{name}.weight" if name else "weight", squares)
        elif isinstance(module, nn.MultiHeadAttention):
            _observe(module, f"{name}.in_proj_weight" if name else "in_proj_weight", squares)
    for batch in batches:
        x = batch.data if isinstance(batch, Tensor) else np.asarray(batch)
        with enable_grad():  # fused layers would not call the observers
            observed(Tensor(x) if x.dtype.kind == "f" else x)
    if not squares:
        raise ConfigurationError("Wanda scores need calibration data: pass an iterable of batches of inputs")
    return {name: np.sqrt(total) for name, total in squares.items()}


def _observe(module: Any, name: str, squares: dict[str, Array]) -> None:
    """Wrap a module's forward method to add the squares of its inputs, per channel, to `squares[name]`."""
    forward = module.forward

    def observing_forward(x: Any, *args: Any, **kwargs: Any) -> Any:
        """Add the squares of x to the sums, and run the module's forward method."""
        values = np.asarray(x.data if isinstance(x, Tensor) else x, np.float64)
        axes = (0, 2, 3) if isinstance(module, nn.Conv2d) else tuple(range(values.ndim - 1))
        squares[name] = squares.get(name, 0.0) + (values**2).sum(axes)
        return forward(x, *args, **kwargs)

    vars(module)["forward"] = observing_forward


def wanda_scores(weight: Array, norms: Array, groups: int = 1) -> Array:
    """Return |weight| times the norm of its input channel, for weights (out, in / groups, ...)."""
    per_group = norms.reshape(groups, -1).repeat(len(weight) // groups, 0)  # (out, in / groups)
    scores: Array = np.abs(weight) * per_group.reshape(*per_group.shape, *[1] * (weight.ndim - 2))
    return scores
