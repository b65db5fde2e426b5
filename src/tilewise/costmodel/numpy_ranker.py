"""TileRanker in plain NumPy: the same weights and function as the torch model, for scoring without torch.

What depends on the kernel alone is worked out once and folded into small matrices: the kernel's vector into the biases,
its scale into the blocks' weights, the query into the keys. A configuration then costs one product with the first
layer, two narrow ones for attention and one per block. All members of the ensemble share those products: they lie one
after another in the rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.numpy_baselines import normalised
from tilewise.costmodel.prepare import Prepared

Floats = npt.NDArray[Any]  # float32, or float64 where rankings are settled
Weights = Mapping[str, Floats]

_ROWS_AT_ONCE = 1024  # rows of one configuration and member each, so that they stay in cache


@dataclass(frozen=True, eq=False)
class Folded:
    """Weights in the form the products want, whatever the kernel."""

    weights: Weights
    first: Floats  # (D, members * H): the first layer of every member, its input scaling multiplied in
    out: Floats  # (members * H,), divided by the number of members
    members: int
    wide: int  # columns at the front of a configuration that describe the kernel


@dataclass(frozen=True, eq=False)
class Encoded:
    """One kernel: what is added and multiplied for each of its configurations."""

    bias: Floats  # (H,) of the first layer
    look: tuple[Floats, Floats, Floats]  # logits are h @ look[0] + look[1]; what is found there is look[2]
    blocks: list[tuple[Floats, Floats]]


def fold(w: Weights, kwargs: Mapping[str, Any]) -> Folded:
    scaling, kernel = w["scaling"], w["config_in.kernel"]  # (members, 1, D), (D, H)
    first = (scaling.transpose(0, 2, 1) * kernel).transpose(1, 0, 2).reshape(len(kernel), -1)
    out = w["out"].reshape(-1) / w["out"].dtype.type(len(scaling))
    return Folded(w, np.ascontiguousarray(first), out, len(scaling), int(kwargs.get("global_width", 0)))


def encode(folded: Folded, part: Prepared) -> Encoded:
    """Everything that the graph decides; only the first configuration's kernel-wide columns are read."""
    w = folded.weights
    nodes = encode_nodes(w, part)
    kernel = encode_kernel(w, nodes, part.config[0, : folded.wide])
    keys, values = _dense(w, "key", nodes), _dense(w, "value", nodes)
    keys = keys / keys.dtype.type(math.sqrt(keys.shape[1]))
    look = w["query.kernel"] @ keys.T, keys @ w["query.bias"], values
    blocks: list[tuple[Floats, Floats]] = []
    while f"film.{len(blocks)}.kernel" in w:
        scale, shift = np.split(_dense(w, f"film.{len(blocks)}", kernel), 2)
        layer = f"blocks.{len(blocks)}"
        factor = 1 + scale
        blocks.append((w[f"{layer}.kernel"] * factor, w[f"{layer}.bias"] * factor + shift))
    return Encoded(w["config_in.bias"] + kernel, look, blocks)


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
    folded = fold(w, kwargs)
    return score_rows(folded, encode(folded, part), part.config)


def score_rows(folded: Folded, encoded: Encoded, config: Floats) -> Floats:
    """The scores of configurations (C, wide + D) of the encoded kernel."""
    scores = np.empty(len(config), config.dtype)
    step = max(1, _ROWS_AT_ONCE // folded.members)
    for start in range(0, len(scores), step):
        rows = slice(start, start + step)
        h = (config[rows, folded.wide :] @ folded.first).reshape(-1, len(encoded.bias))  # (C * members, H)
        h += encoded.bias
        np.maximum(h, 0, out=h)
        h += _attend(h, *encoded.look)
        for kernel, bias in encoded.blocks:
            inner = h @ kernel
            inner += bias
            h += np.maximum(inner, 0, out=inner)
        scores[rows] = h.reshape(-1, len(folded.out)) @ folded.out
    return scores


def _attend(h: Floats, keys: Floats, bias: Floats, values: Floats) -> Floats:
    logits = h @ keys
    logits += bias
    logits -= logits.max(axis=1, keepdims=True)
    np.exp(logits, out=logits)
    logits /= logits.sum(axis=1, keepdims=True)
    result: Floats = logits @ values
    return result


def _dense(w: Weights, name: str, x: Floats) -> Floats:
    return x @ w[f"{name}.kernel"] + w[f"{name}.bias"]


def _relu(x: Floats) -> Floats:
    return np.maximum(x, np.float32(0))
