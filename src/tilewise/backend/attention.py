"""Fused attention, forward and backward: memory grows with the sequence, not with its square.

Queries, keys and values are read where they lie, so the views that split a packed projection into heads are not copied.
A gradient may be written into arrays that the caller hands in (`into`), such as the three parts of that projection's.
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


def _why_not(*arrays: Array, mask: Array | None = None, **_settings: Any) -> str | None:
    for array in arrays:
        if array.dtype != np.float32:
            return "the native kernels take float32 arrays"
    if mask is not None and mask.dtype.kind not in "bf":
        return "the native kernels take masks of bool or float"
    return None


def _whole_mask(mask: Array | None, q: Array, k: Array) -> Array | None:
    """The mask spread over the scores (B, H, T, S), without copying what is broadcast."""
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
    """softmax(q kᵀ · scale + mask) v and the log of each row's sum of exponentials."""
    if mask is not None and q.ndim == k.ndim == 4:
        mask = _whole_mask(mask, q, k)
    result: tuple[Array, Array] = _kernels.attention(q, k, v, causal, mask, scale)
    return result


def attention_grad(
    gout: Array, q: Array, k: Array, v: Array, out: Array, logsumexp: Array, *, causal: bool,
    mask: Array | None = None, scale: float | None = None, into: tuple[Array, Array, Array] | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Gradients of q, k and v, from what `attention` returned."""
    if mask is not None and q.ndim == k.ndim == 4:
        mask = _whole_mask(mask, q, k)
    grads: tuple[Array, Array, Array] = _kernels.attention_grad(
        gout, q, k, v, out, logsumexp, causal, mask, scale, into
    )
    return grads


if native is not None:
    implements("attention", "native", suits=_why_not)(attention)
    implements("attention_grad", "native", suits=_why_not)(attention_grad)
