"""Convert state dicts to and from PyTorch, which is imported only by `to_torch`.

The reference models use PyTorch's parameter names and layouts, so nothing needs to be renamed or transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tilewise.errors import UnavailableError
from tilewise.nn.module import Module
from tilewise.tensor import Tensor


def from_torch(state: Mapping[str, Any] | Any) -> dict[str, Tensor]:
    """Convert a PyTorch module's state (or a state dict) to tensors that share its memory.

    >>> models.mlp().load_state_dict(interop.from_torch(torch_model))  # doctest: +SKIP
    """
    source = state if isinstance(state, Mapping) else state.state_dict()
    return {name: Tensor(value.detach().cpu().numpy()) for name, value in source.items()}


def to_torch(state: Mapping[str, Any] | Module) -> dict[str, Any]:
    """Convert a module's state to PyTorch tensors that share its memory."""
    try:
        import torch
    except ImportError:
        raise UnavailableError("PyTorch is not installed: pip install 'tilewise[train]'") from None
    source = state.state_dict() if isinstance(state, Module) else state
    return {name: torch.from_numpy(np.asarray(value)) for name, value in source.items()}
