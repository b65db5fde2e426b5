"""TileRanker in plain NumPy: the same weights and function as the torch model, for scoring without torch.

What depends on the kernel alone (node encodings, the kernel's vector, its shift and scale per block, keys and values)
is worked out once; each member of the ensemble then passes over the configurations in blocks that stay in cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.numpy_baselines import normalised
from tilewise.costmodel.prepare import Prepared

Floats = npt.NDArray[Any]  # float32
Weights = Mapping[str, Floats]

_ROWS_AT_ONCE = 512


def _dense(w: Weights, name: str, x: Floats) -> Floats:
    return x @ w[f"{name}.kernel"] + w[f"{name}.bias"]


def _relu(x: Floats) -> Floats:
    return np.maximum(x, np.float32(0))


def encode_nodes(w: Weights, part: Prepared) -> Floats:
    x = _relu(_dense(w, "node_in", np.concatenate([part.node, w["embedding.table"][part.opcode]], axis=1)))
    outward, inward = normalised(part)
    depth = 0
    while f"gnn.{depth}.kernel" in w:
        x = x + _relu(_dense(w, f"gnn.{depth}", np.concatenate([outward @ x, inward @ x], axis=1)))
        depth += 1
    return x  # (n, node_dim)


def encode_kernel(w: Weights, nodes: Floats, wide: Floats) -> Floats:
    total, count = nodes.sum(axis=0), nodes.dtype.type(len(nodes))
    return _relu(_dense(w, "kernel_in", np.concatenate([total / count, total / np.sqrt(count), wide])))


def forward(w: Weights, kwargs: Mapping[str, Any], part: Prepared) -> Floats:
    """One score per configuration, lower is faster."""
    wide = int(kwargs.get("global_width", 0))
    nodes = encode_nodes(w, part)
    kernel = encode_kernel(w, nodes, part.config[0, :wide])
    keys, values = _dense(w, "key", nodes), _dense(w, "value", nodes)
    films: list[list[Floats]] = []
    while f"film.{len(films)}.kernel" in w:
        films.append(np.split(_dense(w, f"film.{len(films)}", kernel), 2))
    scores = np.zeros(len(part.config), part.config.dtype)
    for start in range(0, len(scores), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        own = part.config[rows, wide:]
        for member in range(len(w["scaling"])):
            # The member's scaling is applied to the weights: fewer numbers than configurations have.
            first = w["scaling"][member, 0][:, None] * w["config_in.kernel"]
            h = _relu(own @ first + (w["config_in.bias"] + kernel))
            h += _attend(_dense(w, "query", h), keys, values)
            for depth, (scale, shift) in enumerate(films):
                factor = 1 + scale
                h += _relu(h @ (w[f"blocks.{depth}.kernel"] * factor) + (w[f"blocks.{depth}.bias"] * factor + shift))
            scores[rows] += (h @ w["out"][member])[:, 0]
    return np.asarray(scores / len(w["scaling"]), dtype=scores.dtype)


def _attend(query: Floats, keys: Floats, values: Floats) -> Floats:
    logits = query @ keys.T
    logits *= 1 / math.sqrt(keys.shape[1])
    logits -= logits.max(axis=1, keepdims=True)
    np.exp(logits, out=logits)
    logits /= logits.sum(axis=1, keepdims=True)
    result: Floats = logits @ values
    return result
