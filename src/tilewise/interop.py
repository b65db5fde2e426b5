"""State dicts to and from PyTorch. PyTorch is imported only when something is handed to it.

The reference models use PyTorch's parameter names and layouts, so a state dict is only ever converted, never renamed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tilewise.errors import UnavailableError
from tilewise.nn.module import Module
from tilewise.tensor import Tensor


def from_torch(state: Mapping[str, Any] | Any) -> dict[str, Tensor]:
    """A PyTorch module's state (or a state dict) as tensors on the same memory; `model.load_state_dict` copies them.

    >>> models.mlp().load_state_dict(interop.from_torch(torch_model))  # doctest: +SKIP
    """
    found = state if isinstance(state, Mapping) else state.state_dict()
    return {name: Tensor(value.detach().cpu().numpy()) for name, value in found.items()}


def to_torch(state: Mapping[str, Any] | Module) -> dict[str, Any]:
    """A module's state as PyTorch tensors on the same memory."""
    try:
        import torch
    except ImportError:
        raise UnavailableError("PyTorch is not installed: pip install 'tilewise[train]'") from None
    source = state.state_dict() if isinstance(state, Module) else state
    return {name: torch.from_numpy(np.asarray(value)) for name, value in source.items()}
