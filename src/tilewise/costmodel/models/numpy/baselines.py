"""The five baselines in plain NumPy, for scoring where there is no torch. Same weights, same function.

Arrays per (configuration, node) pair are (C, n, H); the first layer of an early join is applied to nodes and
configurations apart, as in the torch models. The precision is that of the inputs: float32 to score all
configurations, float64 to settle the order of the first few.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.features.scaling import Prepared
from tilewise.costmodel.models.numpy import sage
from tilewise.errors import FileFormatError

Floats = npt.NDArray[Any]  # float32
Weights = Mapping[str, Floats]

_DENSE_NODES = 256
_PAIRS_AT_ONCE = 1 << 14
_SELU = (1.0507009873554805, 1.6732632423543772)


def _gelu(x: Floats) -> Floats:
    from tilewise.backend.numpy_ops import gelu

    return np.asarray(gelu(x), dtype=x.dtype)


def _elu(x: Floats) -> Floats:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "leaky_relu": lambda x: np.maximum(x, np.float32(0.2) * x),
    "relu": lambda x: np.maximum(x, np.float32(0)),
    "gelu": _gelu,
    "tanh": np.tanh,
    "sigmoid": lambda x: np.float32(1) / (1 + np.exp(-np.clip(x, -80, 80))),
    "elu": _elu,
    "selu": lambda x: np.float32(_SELU[0]) * np.where(x > 0, x, np.float32(_SELU[1]) * np.expm1(np.minimum(x, 0))),
    "softplus": lambda x: np.logaddexp(np.float32(0), x),
    "swish": lambda x: x / (1 + np.exp(-np.clip(x, -80, 80))),
    "silu": lambda x: x / (1 + np.exp(-np.clip(x, -80, 80))),
    "linear": lambda x: x,
}


class Matrix:
    """A sparse square matrix over the nodes of one kernel, dense where that is quicker."""

    def __init__(
        self, rows: npt.NDArray[Any], columns: npt.NDArray[Any], values: npt.NDArray[Any], n: int, dtype: Any
    ) -> None:
        self.n, self.dense = n, None
        order = np.argsort(rows, kind="stable")
        self.rows, self.columns, self.values = rows[order], columns[order], values[order].astype(dtype)
        if self.n <= _DENSE_NODES:
            self.dense = np.zeros((self.n, self.n), dtype)
            np.add.at(self.dense, (rows, columns), values)

    def __matmul__(self, x: Floats) -> Floats:
        """Over the second to last axis of (..., n, H)."""
        if self.dense is not None:
            return np.asarray(np.matmul(self.dense, x))
        result = np.zeros_like(x)
        filled, starts = np.unique(self.rows, return_index=True)
        if len(filled):
            terms = x[..., self.columns, :] * self.values[:, None]
            result[..., filled, :] = np.add.reduceat(terms, starts, axis=-2)
        return result


def neighbours(part: Prepared) -> Matrix:
    u, v = part.edges[:, 0].astype(np.int64), part.edges[:, 1].astype(np.int64)
    return Matrix(np.concatenate([v, u]), np.concatenate([u, v]), np.ones(2 * len(u)), len(part.node), part.node.dtype)


def normalised(part: Prepared) -> tuple[Matrix, Matrix]:
    """A + I over its row sums, and its transpose. Kernels that differ in their sizes alone share them."""
    edges = np.ascontiguousarray(part.edges, np.int64)
    return _normalised(len(part.node), edges.tobytes(), part.node.dtype)


@functools.lru_cache(maxsize=64)
def _normalised(n: int, edges: bytes, dtype: np.dtype[Any]) -> tuple[Matrix, Matrix]:
    every, ends = np.arange(n), np.frombuffer(edges, np.int64).reshape(-1, 2)
    rows, columns = np.concatenate([ends[:, 1], every]), np.concatenate([ends[:, 0], every])
    values = 1.0 / np.bincount(rows, minlength=n)[rows]
    return Matrix(rows, columns, values, n, dtype), Matrix(columns, rows, values, n, dtype)


def _dense(w: Weights, name: str, x: Floats) -> Floats:
    result: Floats = x @ w[f"{name}.kernel"] + w[f"{name}.bias"]
    return result


def _stack(w: Weights, name: str, x: Floats, act: Callable[[Floats], Floats], first: Floats | None = None) -> Floats:
    depth = 0
    while f"{name}.layers.{depth}.kernel" in w:
        if depth == 0 and first is not None:
            x = first
        else:
            x = _dense(w, f"{name}.layers.{depth}", x if depth == 0 else act(x))
        depth += 1
    return x


def _join(w: Weights, name: str, left: Floats, right: Floats) -> Floats:
    """The dense layer `name` of [left, right], from the two apart: (a, H) and (b, H) give (b, a, H)."""
    kernel, bias = w[f"{name}.kernel"], w[f"{name}.bias"]
    joined: Floats = (left @ kernel[: left.shape[-1]] + bias)[None] + (right @ kernel[left.shape[-1] :])[:, None]
    return joined


def _nodes(w: Weights, part: Prepared) -> Floats:
    return np.concatenate([part.node, w["embedding.table"][part.opcode]], axis=1)


def _reduce(x: Floats, reduction: str) -> Floats:
    if reduction == "max":
        return np.asarray(x.max(axis=-2))
    return np.asarray(x.mean(axis=-2) if reduction == "mean" else x.sum(axis=-2), dtype=x.dtype)


def _late(w: Weights, part: Prepared, pooled: Floats, act: Callable[[Floats], Floats]) -> Floats:
    first = _join(w, "head.layers.0", pooled[None], part.config)[:, 0]
    return _stack(w, "head", first, act, first)[:, 0]


def _normalise(x: Floats) -> Floats:
    norm: Floats = np.sqrt(np.einsum("...h,...h->...", x, x))[..., None]
    return x / np.maximum(norm, np.float32(1e-6))


def _mlp(w: Weights, kw: Mapping[str, Any], part: Prepared) -> Floats:
    pooled = _reduce(_nodes(w, part), kw.get("reduction", "sum"))
    return _late(w, part, pooled, ACTIVATIONS[kw.get("hidden_activation", "leaky_relu")])


def _sage_layers(w: Weights, x: Floats, near: Matrix, act: Callable[[Floats], Floats], depth: int) -> Floats:
    while f"gnn.{depth}.kernel" in w:
        kernel = w[f"gnn.{depth}.kernel"]
        half = len(kernel) // 2
        z = (near @ x) @ kernel[:half] + x @ kernel[half:] + w[f"gnn.{depth}.bias"]
        x, depth = _normalise(act(z)), depth + 1
    return x


def _late_sage(w: Weights, kw: Mapping[str, Any], part: Prepared) -> Floats:
    act = ACTIVATIONS[kw.get("hidden_activation", "leaky_relu")]
    x = _sage_layers(w, _nodes(w, part), neighbours(part), act, 0)
    return _late(w, part, x.sum(axis=0), act)


def _early_sage(w: Weights, kw: Mapping[str, Any], part: Prepared) -> Floats:
    act = ACTIVATIONS[kw.get("hidden_activation", "leaky_relu")]
    if "gnn.0.kernel" in w and _compiled("EarlyJoinSAGE", kw, part):
        return _compiled_sage(w, part)
    nodes, near = _nodes(w, part), neighbours(part)
    if "gnn.0.kernel" not in w:
        pooled = np.broadcast_to(nodes.sum(axis=0), (len(part.config), nodes.shape[1]))
        return _stack(w, "head", np.concatenate([pooled, len(nodes) * part.config], axis=1), act)[:, 0]
    near_node, near_config, own_node, own_config = np.split(
        w["gnn.0.kernel"],
        np.cumsum([nodes.shape[1], part.config.shape[1], nodes.shape[1]]),
    )
    from_node = (near @ nodes) @ near_node + nodes @ own_node + w["gnn.0.bias"]
    degree = np.bincount(part.edges.ravel(), minlength=len(nodes)).astype(nodes.dtype)[:, None]
    z = from_node + (part.config @ own_config)[:, None] + degree * (part.config @ near_config)[:, None]
    return _stack(w, "head", _sage_layers(w, _normalise(act(z)), near, act, 1).sum(axis=1), act)[:, 0]


def _compiled(model: str, kw: Mapping[str, Any], part: Prepared) -> bool:
    """Whether the compiled kernels do this model's layers; float64 they leave to NumPy."""
    known = model == "EarlyJoinSAGE" and sage.available(kw.get("hidden_activation", "leaky_relu"))
    return known and part.config.dtype == np.float32


def _compiled_sage(w: Weights, part: Prepared) -> Floats:
    names = ["embedding.table", *_layers(w, "gnn."), *_layers(w, "head.layers.")]
    arrays = [np.ascontiguousarray(w[name], dtype=np.float32) for name in names]
    weights = sage.Weights.of(arrays, len(_layers(w, "gnn.")) // 2)
    node, config = np.ascontiguousarray(part.node), np.ascontiguousarray(part.config)
    return sage.scores(weights, node, part.opcode, config, part.neighbours)


def _layers(w: Weights, prefix: str) -> list[str]:
    """The names of the dense layers numbered after `prefix`, kernel and bias in turn."""
    depth = sum(name.startswith(prefix) and name.endswith(".kernel") for name in w)
    return [f"{prefix}{number}.{part}" for number in range(depth) for part in ("kernel", "bias")]


def _convolve(w: Weights, kw: Mapping[str, Any], x: Floats, part: Prepared, act: Callable[[Floats], Floats]) -> Floats:
    outward, inward = normalised(part)
    depth, step = 0, 3 if kw.get("directed") else 1
    while f"gnn.{depth}.layers.0.kernel" in w:
        y = act(x)
        if step == 3:
            parts = (outward @ y, inward @ y, y)
            x = x + sum((_stack(w, f"gnn.{depth + i}", p, act) for i, p in enumerate(parts)), np.float32(0))
        else:
            x = x + _stack(w, f"gnn.{depth}", outward @ y + inward @ y + y, act)
        depth += step
    return _reduce(act(x), kw.get("reduction", "sum"))


def _late_gcn(w: Weights, kw: Mapping[str, Any], part: Prepared) -> Floats:
    act = ACTIVATIONS[kw.get("hidden_activation", "leaky_relu")]
    pooled = _convolve(w, kw, _stack(w, "prenet", _nodes(w, part), act), part, act)
    return _late(w, part, pooled, act)


def _early_gcn(w: Weights, kw: Mapping[str, Any], part: Prepared) -> Floats:
    act = ACTIVATIONS[kw.get("hidden_activation", "leaky_relu")]
    first = _join(w, "prenet.layers.0", _nodes(w, part), part.config)
    return _stack(w, "head", _convolve(w, kw, _stack(w, "prenet", first, act, first), part, act), act)[:, 0]


FORWARD: dict[str, Callable[[Weights, Mapping[str, Any], Prepared], Floats]] = {
    "MLP": _mlp,
    "LateJoinSAGE": _late_sage,
    "EarlyJoinSAGE": _early_sage,
    "LateJoinResGCN": _late_gcn,
    "EarlyJoinResGCN": _early_gcn,
}


def chunk_size(model: str, kwargs: Mapping[str, Any], part: Prepared) -> int:
    """How many configurations at once keep an early join's pairs in cache."""
    if model.startswith("Early") and not _compiled(model, kwargs, part):
        return max(16, _PAIRS_AT_ONCE // max(1, len(part.node)))
    return 4096


def forward(model: str, weights: Weights, kwargs: Mapping[str, Any], part: Prepared) -> Floats:
    if model not in FORWARD:
        raise FileFormatError(
            f"The NumPy scorer has no model {model!r}; load the file with load_model, which uses torch."
        )
    return FORWARD[model](weights, kwargs, part)
