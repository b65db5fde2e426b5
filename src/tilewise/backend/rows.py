"""Compiled, threaded float32 kernels that work on rows: activations, softmax, norms, losses and Adam.

A float32 array that is not in C order is copied; other float types use the NumPy versions. Results are bit-identical
for every number of threads. Functions that update in place need arrays in C order.
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
    """Gradient of ``sum(row_weights * losses)`` with respect to the logits."""
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
    """Sum the rows of ``gout`` that belong to each of the table's ``rows`` rows."""
    _check_rows(gout, ids, "embedding_grad")
    table = np.empty((rows, gout.shape[1]), np.float32)
    _kernels.embedding_grad(_c_order(gout, np.float32), _checked_ids(ids, rows, "ids"), table)
    return table


if native is not None:
    for _name in _WITHOUT_WRAPPER:
        implements(_name, "native", unsupported_reason=native.why_not_float32)(getattr(native, _name))
    for _function in (cross_entropy, cross_entropy_grad, embedding_grad):
        implements(_function.__name__, "native", unsupported_reason=native.why_not_float32)(_function)
    for _name in ("adam_step", "add_in_place", "scale_in_place"):
        implements(_name, "native", unsupported_reason=_in_place_unsupported_reason)(getattr(native, _name))
