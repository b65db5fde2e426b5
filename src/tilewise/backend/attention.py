"""Fused attention, forward and backward: memory grows linearly with the sequence length (Dao et al. 2022).

Queries, keys and values may have any strides, so the views that split a packed projection into heads are not copied.
Gradients can be written into arrays of the caller (`into`), such as views of that projection's gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise.backend.registry import implements
from tilewise.errors import ShapeError

Array = npt.NDArray[Any]

_kernels: Any = native


def _unsupported_reason(*arrays: Array, mask: Array | None = None, **_settings: Any) -> str | None:
    for array in arrays:
        if array.dtype != np.float32:
            return "the native kernels support only float32 arrays"
    if mask is not None and mask.dtype.kind not in "bf":
        return "the native kernels support only masks of bool or float"
    return None


def _broadcast_mask(mask: Array | None, q: Array, k: Array) -> Array | None:
    """Broadcast the mask to the scores (B, H, T, S) without copying."""
    if mask is None:
        return None
    scores = (*q.shape[:3], k.shape[2])
    mask = mask if mask.dtype == np.bool_ else mask.astype(np.float32, copy=False)
    try:
        return np.broadcast_to(mask, scores)
    except ValueError:
        raise ShapeError(f"a mask of shape {mask.shape} does not broadcast to the scores {scores}") from None


def attention(
    q: Array, k: Array, v: Array, *, causal: bool, mask: Array | None = None, scale: float | None = None
) -> tuple[Array, Array]:
    """Compute softmax(q kᵀ · scale + mask) v and the log-sum-exp of each row of scores."""
    if mask is not None and q.ndim == k.ndim == 4:
        mask = _broadcast_mask(mask, q, k)
    result: tuple[Array, Array] = _kernels.attention(q, k, v, causal, mask, scale)
    return result


def attention_grad(
    gout: Array, q: Array, k: Array, v: Array, out: Array, logsumexp: Array, *, causal: bool,
    mask: Array | None = None, scale: float | None = None, into: tuple[Array, Array, Array] | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Compute the gradients of q, k and v from the results of `attention`."""
    if mask is not None and q.ndim == k.ndim == 4:
        mask = _broadcast_mask(mask, q, k)
    grads: tuple[Array, Array, Array] = _kernels.attention_grad(
        gout, q, k, v, out, logsumexp, causal, mask, scale, into
    )
    return grads


if native is not None:
    implements("attention", "native", _unsupported_reason)(attention)
    implements("attention_grad", "native", _unsupported_reason)(attention_grad)
