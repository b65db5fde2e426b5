"""Compiled, threaded float32 kernels that work on rows: activations, softmax, norms, losses, Adam and attention.

A float32 array that is not in C order is copied; other float types use the NumPy versions. Results are bit-identical
for every number of threads. Functions that update in place need arrays in C order.

Attention is fused, forward and backward: memory grows linearly with the sequence length (Dao et al. 2022). Queries,
keys and values may have any strides, so the views that split a packed projection into heads are not copied. Gradients
can be written into arrays of the caller (`into`), such as views of that projection's gradient.
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

_WITHOUT_WRAPPER = (
    *("gelu", "gelu_grad", "relu", "relu_grad", "softmax", "softmax_grad", "log_softmax", "log_softmax_grad"),
    *("layer_norm", "layer_norm_grad", "batch_norm", "batch_norm_grad"),
    *("sum_rows", "sum_channels", "sum_of_squares"),
)


def _in_place_unsupported_reason(*args: Any, **_settings: Any) -> str | None:
    """Return why the in-place kernel cannot take these arrays; None if it can."""
    for array in args:
        if isinstance(array, np.ndarray) and (array.dtype != np.float32 or not array.flags.c_contiguous):
            return "the native kernel works in place on float32 arrays in C order"
    return None


def _c_order(array: Array, dtype: type) -> Array:
    return np.ascontiguousarray(array, dtype)


def _checked_ids(ids: Array, limit: int, name: str) -> Array:
    """Convert ids to int64 in C order; ShapeError unless they are one-dimensional and in [0, limit)."""
    ids = _c_order(ids, np.int64)
    if ids.ndim != 1:
        raise ShapeError(f"{name} must be one-dimensional, not of shape {ids.shape}")
    if ids.size and (ids.min() < 0 or ids.max() >= limit):
        raise ShapeError(f"{name} must be between 0 and {limit - 1}, but one is {ids[(ids < 0) | (ids >= limit)][0]}")
    return ids


def _check_rows(rows: Array, ids: Array, op: str) -> None:
    if rows.ndim != 2 or len(rows) != len(ids):
        raise ShapeError(f"{op} needs a (rows, columns) array and one id per row, not {rows.shape} and {ids.shape}")


def cross_entropy(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Compute the loss and the log-sum-exp of each row of (rows, classes) logits."""
    _check_rows(logits, targets, "cross_entropy")
    targets = _checked_ids(targets, logits.shape[1], "targets")
    losses, logsumexp = np.empty(len(targets), np.float32), np.empty(len(targets), np.float32)
    _kernels.cross_entropy(_c_order(logits, np.float32), targets, losses, logsumexp)
    return losses, logsumexp


def cross_entropy_grad(logits: Array, targets: Array, logsumexp: Array, row_weights: Array) -> Array:
    """Return the gradient of ``sum(row_weights * losses)`` with respect to the logits."""
    _check_rows(logits, targets, "cross_entropy_grad")
    if logsumexp.shape != targets.shape or row_weights.shape != targets.shape:
        raise ShapeError("cross_entropy_grad needs one logsumexp and one weight per row")
    targets = _checked_ids(targets, logits.shape[1], "targets")
    glogits = np.empty(logits.shape, np.float32)
    _kernels.cross_entropy_grad(
        *(_c_order(logits, np.float32), targets, _c_order(logsumexp, np.float32)),
        *(_c_order(row_weights, np.float32), glogits),
    )
    return glogits


def embedding_grad(gout: Array, ids: Array, rows: int) -> Array:
    """Sum the gradients of looked-up rows, `gout` (ids, width), into a table of `rows` rows."""
    _check_rows(gout, ids, "embedding_grad")
    table = np.empty((rows, gout.shape[1]), np.float32)
    _kernels.embedding_grad(_c_order(gout, np.float32), _checked_ids(ids, rows, "ids"), table)
    return table


def _attention_unsupported_reason(*arrays: Array, mask: Array | None = None, **_settings: Any) -> str | None:
    """Return why the native attention kernels cannot take these arguments; None if they can."""
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
    """Return the gradients of q, k and v from that of the result, `gout`; they are written `into` arrays if given."""
    if mask is not None and q.ndim == k.ndim == 4:
        mask = _broadcast_mask(mask, q, k)
    grads: tuple[Array, Array, Array] = _kernels.attention_grad(
        gout, q, k, v, out, logsumexp, causal, mask, scale, into
    )
    return grads


if native is not None:
    for _name in _WITHOUT_WRAPPER:
        implements(_name, "native", unsupported_reason=native.why_not_float32)(getattr(native, _name))
    for _function in (cross_entropy, cross_entropy_grad, embedding_grad):
        implements(_function.__name__, "native", unsupported_reason=native.why_not_float32)(_function)
    for _name in ("adam_step", "add_in_place", "scale_in_place"):
        implements(_name, "native", unsupported_reason=_in_place_unsupported_reason)(getattr(native, _name))
    implements("attention", "native", unsupported_reason=_attention_unsupported_reason)(attention)
    implements("attention_grad", "native", unsupported_reason=_attention_unsupported_reason)(attention_grad)
