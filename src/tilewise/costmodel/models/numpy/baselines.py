"""The five published baselines in plain NumPy, with the torch models' weights, for scoring without torch.

Arrays of (configuration, node) pairs are (C, n, H). The first layer of an early join is applied to nodes and
configurations separately and added, as in the torch models. The precision is that of the inputs: float32 to score all
configurations, float64 to order those with close scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.features.inputs import ModelInputs
from tilewise.costmodel.models.numpy.ranker import NodeMatrix, normalized_adjacency
from tilewise.errors import FileFormatError

Floats = npt.NDArray[Any]  # float32
Weights = Mapping[str, Floats]

_CHUNK_PAIRS = 1 << 14  # (configuration, node) pairs of an early join that stay in the cache
_CHUNK_CONFIGS = 4096  # configurations per chunk of the other models
_MIN_CHUNK = 16
_SELU = (1.0507009873554805, 1.6732632423543772)  # scale and alpha of Klambauer et al. 2017


def _gelu(x: Floats) -> Floats:
    """Apply GELU; the result has the dtype of x."""
    from tilewise.backend.numpy_ops import gelu

    return np.asarray(gelu(x), dtype=x.dtype)


def _elu(x: Floats) -> Floats:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


Activation = Callable[[Floats], Floats]

ACTIVATIONS: dict[str, Activation] = {
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


def neighbour_sums(inputs: ModelInputs) -> NodeMatrix:
    """Return A + A^T, whose product with node values sums them over the neighbours in both directions."""
    u, v = inputs.edges[:, 0].astype(np.int64), inputs.edges[:, 1].astype(np.int64)
    return NodeMatrix(
        np.concatenate([v, u]), np.concatenate([u, v]), np.ones(2 * len(u)), len(inputs.node), inputs.node.dtype
    )


def _dense(w: Weights, name: str, x: Floats) -> Floats:
    result: Floats = x @ w[f"{name}.kernel"] + w[f"{name}.bias"]
    return result


def _stack(w: Weights, name: str, x: Floats, act: Activation, first: Floats | None = None) -> Floats:
    """Apply the dense layers `name.0`, `name.1`, ... with activations in between."""
    depth = 0
    # The depth follows from the weights that exist.
    while f"{name}.layers.{depth}.kernel" in w:
        if depth == 0 and first is not None:
            x = first
        else:
            x = _dense(w, f"{name}.layers.{depth}", x if depth == 0 else act(x))
        depth += 1
    return x


def _dense_on_pairs(w: Weights, name: str, left: Floats, right: Floats) -> Floats:
    """Apply dense layer `name` to all concatenations of rows of `left` (a, L) and `right` (b, R): (b, a, H)."""
    # [left, right] @ kernel is left @ upper rows + right @ lower rows, so each is multiplied once.
    kernel, bias = w[f"{name}.kernel"], w[f"{name}.bias"]
    joined: Floats = (left @ kernel[: left.shape[-1]] + bias)[None] + (right @ kernel[left.shape[-1] :])[:, None]
    return joined


def _node_inputs(w: Weights, inputs: ModelInputs) -> Floats:
    """Join node features and opcode embeddings, (n, F + E)."""
    return np.concatenate([inputs.node, w["embedding.table"][inputs.opcode]], axis=1)


def _reduce(x: Floats, reduction: str) -> Floats:
    """Pool x over its nodes, the second to last axis, by "sum", "mean" or "max"."""
    if reduction == "max":
        return np.asarray(x.max(axis=-2))
    return np.asarray(x.mean(axis=-2) if reduction == "mean" else x.sum(axis=-2), dtype=x.dtype)


def _late_join(w: Weights, inputs: ModelInputs, pooled: Floats, act: Activation) -> Floats:
    """Concatenate the pooled graph with every configuration and apply the head: (C,)."""
    first = _dense_on_pairs(w, "head.layers.0", pooled[None], inputs.config)[:, 0]
    return _stack(w, "head", first, act, first)[:, 0]


def _l2_normalize(x: Floats) -> Floats:
    norm: Floats = np.sqrt(np.einsum("...h,...h->...", x, x))[..., None]
    return x / np.maximum(norm, np.float32(1e-6))


def _mlp(w: Weights, kw: Mapping[str, Any], inputs: ModelInputs) -> Floats:
    pooled = _reduce(_node_inputs(w, inputs), kw.get("reduction", "sum"))
    return _late_join(w, inputs, pooled, ACTIVATIONS[kw.get("hidden_activation", "leaky_relu")])


def _sage_layers(w: Weights, x: Floats, near: NodeMatrix, act: Activation, depth: int) -> Floats:
    """Apply GraphSAGE layers from number `depth` on to node values x (n, H); `near` sums over neighbours."""
    while f"gnn.{depth}.kernel" in w:
        kernel = w[f"gnn.{depth}.kernel"]
        half = len(kernel) // 2
        z = (near @ x) @ kernel[:half] + x @ kernel[half:] + w[f"gnn.{depth}.bias"]
        x, depth = _l2_normalize(act(z)), depth + 1
    return x


def _late_sage(w: Weights, kw: Mapping[str, Any], inputs: ModelInputs) -> Floats:
    """Score with LateJoinSAGE (graph pooled first, configuration joined after): one score per configuration."""
    act = ACTIVATIONS[kw.get("hidden_activation", "leaky_relu")]
    x = _sage_layers(w, _node_inputs(w, inputs), neighbour_sums(inputs), act, 0)
    return _late_join(w, inputs, x.sum(axis=0), act)


def _early_sage(w: Weights, kw: Mapping[str, Any], inputs: ModelInputs) -> Floats:
    """Score with EarlyJoinSAGE; the first layer is computed for nodes and configurations separately."""
    act = ACTIVATIONS[kw.get("hidden_activation", "leaky_relu")]
    nodes, near = _node_inputs(w, inputs), neighbour_sums(inputs)
    if "gnn.0.kernel" not in w:
        # Without layers, nodes and configurations are only summed.
        pooled = np.broadcast_to(nodes.sum(axis=0), (len(inputs.config), nodes.shape[1]))
        return _stack(w, "head", np.concatenate([pooled, len(nodes) * inputs.config], axis=1), act)[:, 0]
    # First layer: the kernel has a part for each of [neighbours, itself] x [node, configuration].
    near_node, near_config, own_node, own_config = np.split(
        w["gnn.0.kernel"],
        np.cumsum([nodes.shape[1], inputs.config.shape[1], nodes.shape[1]]),
    )
    from_node = (near @ nodes) @ near_node + nodes @ own_node + w["gnn.0.bias"]
    # The neighbours of a node share the configuration, so their sum is degree times its term.
    degree = np.bincount(inputs.edges.ravel(), minlength=len(nodes)).astype(nodes.dtype)[:, None]
    z = from_node + (inputs.config @ own_config)[:, None] + degree * (inputs.config @ near_config)[:, None]
    return _stack(w, "head", _sage_layers(w, _l2_normalize(act(z)), near, act, 1).sum(axis=1), act)[:, 0]


def _convolve(w: Weights, kw: Mapping[str, Any], x: Floats, inputs: ModelInputs, act: Activation) -> Floats:
    """Apply the residual graph convolutions to node values x, and pool them over the nodes."""
    outward, inward = normalized_adjacency(inputs)
    depth, step = 0, 3 if kw.get("directed") else 1
    while f"gnn.{depth}.layers.0.kernel" in w:
        y = act(x)
        if step == 3:
            # Directed: separate weights for producers, consumers and the node itself.
            terms = (outward @ y, inward @ y, y)
            x = x + sum((_stack(w, f"gnn.{depth + i}", term, act) for i, term in enumerate(terms)), np.float32(0))
        else:
            x = x + _stack(w, f"gnn.{depth}", outward @ y + inward @ y + y, act)
        depth += step
    return _reduce(act(x), kw.get("reduction", "sum"))


def _late_gcn(w: Weights, kw: Mapping[str, Any], inputs: ModelInputs) -> Floats:
    """Score with LateJoinResGCN (graph pooled first, configuration joined after): one score per configuration."""
    act = ACTIVATIONS[kw.get("hidden_activation", "leaky_relu")]
    pooled = _convolve(w, kw, _stack(w, "prenet", _node_inputs(w, inputs), act), inputs, act)
    return _late_join(w, inputs, pooled, act)


def _early_gcn(w: Weights, kw: Mapping[str, Any], inputs: ModelInputs) -> Floats:
    """Score with EarlyJoinResGCN (configuration joined to every node's input): one score per configuration."""
    act = ACTIVATIONS[kw.get("hidden_activation", "leaky_relu")]
    first = _dense_on_pairs(w, "prenet.layers.0", _node_inputs(w, inputs), inputs.config)
    return _stack(w, "head", _convolve(w, kw, _stack(w, "prenet", first, act, first), inputs, act), act)[:, 0]


FORWARD: dict[str, Callable[[Weights, Mapping[str, Any], ModelInputs], Floats]] = {
    "MLP": _mlp,
    "LateJoinSAGE": _late_sage,
    "EarlyJoinSAGE": _early_sage,
    "LateJoinResGCN": _late_gcn,
    "EarlyJoinResGCN": _early_gcn,
}


def score(model: str, weights: Weights, kwargs: Mapping[str, Any], inputs: ModelInputs) -> Floats:
    """Score all configurations with the baseline called `model`, in chunks of bounded memory: (C,)."""
    early = model.startswith("Early")
    size = max(_MIN_CHUNK, _CHUNK_PAIRS // max(1, len(inputs.node))) if early else _CHUNK_CONFIGS
    chunks = [inputs.config[start : start + size] for start in range(0, len(inputs.config), size)]
    return np.concatenate([forward(model, weights, kwargs, inputs.with_config(rows)) for rows in chunks])


def forward(model: str, weights: Weights, kwargs: Mapping[str, Any], inputs: ModelInputs) -> Floats:
    """Run the baseline called `model` on all configurations of `inputs` at once: (C,)."""
    if model not in FORWARD:
        raise FileFormatError(
            f"The NumPy scorer has no model {model!r}; load the file with load_model, which uses torch."
        )
    return FORWARD[model](weights, kwargs, inputs)
