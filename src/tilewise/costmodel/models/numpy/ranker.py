"""TileRanker in plain NumPy: the same weights and function as the torch model, for scoring without torch.

What depends on the kernel alone is worked out once and folded into small matrices: the kernel's vector into the biases,
its scale into the blocks' weights, the query into the keys. A configuration then costs one product with the first
layer, two narrow ones for attention and one per block. All members of the ensemble share those products: they lie one
after another in the rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise.costmodel.features.scaling import Prepared
from tilewise.costmodel.models.numpy.baselines import normalised

Floats = npt.NDArray[Any]  # float32, or float64 where rankings are settled
Weights = Mapping[str, Floats]
Dense = tuple[Floats, Floats]  # a layer: kernel and bias

_ROWS_AT_ONCE = 1024  # rows of one configuration and member each, so that they stay in cache


@dataclass(frozen=True, eq=False)
class Folded:
    """Weights in the form the products want, whatever the kernel."""

    weights: Weights
    first: Floats  # (D, members * H): the first layer of every member, its input scaling multiplied in
    out: Floats  # (members * H,), divided by the number of members
    members: int
    wide: int  # columns at the front of a configuration that describe the kernel
    last: Floats  # (members * H, members): `out`, each member's beside the others'
    gnn: list[Dense]
    films: list[tuple[Dense, Dense]]  # of each block, what the kernel's vector makes of it, and its own layer


@dataclass(frozen=True, eq=False)
class Encoded:
    """One kernel: what is added and multiplied for each of its configurations."""

    bias: Floats  # (H,) of the first layer
    look: tuple[Floats, Floats, Floats]  # logits are h @ look[0] + look[1]; what is found there is look[2]
    blocks: list[Dense]


def fold(w: Weights, kwargs: Mapping[str, Any]) -> Folded:
    members = len(w["scaling"])
    out = w["out"] / w["out"].dtype.type(members)  # (members, H, 1)
    wide = int(kwargs.get("global_width", 0))
    films = list(zip(_layers(w, "film"), _layers(w, "blocks"), strict=True))
    return Folded(w, first_layers(w), out.reshape(-1), members, wide, last_layers(out), _layers(w, "gnn"), films)


def _layers(w: Weights, name: str) -> list[Dense]:
    """Those called `name.0`, `name.1` and so on."""
    count = next(number for number in itertools.count() if f"{name}.{number}.kernel" not in w)
    return [(w[f"{name}.{number}.kernel"], w[f"{name}.{number}.bias"]) for number in range(count)]


def first_layers(w: Weights) -> Floats:
    """(D, members * H): layer one of every member, the inputs' scaling in its rows."""
    wide = w["scaling"].transpose(0, 2, 1) * w["config_in.kernel"]  # (members, D, H)
    return np.ascontiguousarray(wide.transpose(1, 0, 2).reshape(wide.shape[1], -1))


def last_layers(out: Floats) -> Floats:
    """(members * H, members): every member has its own last layer, (H, 1), beside the others'."""
    every = np.arange(len(out))
    last = np.zeros((len(out), out.shape[1], len(out)), out.dtype)
    last[every, :, every] = out[:, :, 0]
    return last.reshape(-1, len(out))


def encode(folded: Folded, part: Prepared) -> Encoded:
    """Everything that the graph decides; only the first configuration's kernel-wide columns are read."""
    w = folded.weights
    nodes = encode_nodes(folded, part)
    kernel = encode_kernel(w, nodes, part.config[0, : folded.wide])
    keys, values = _dense(w, "key", nodes), _dense(w, "value", nodes)
    keys = keys / keys.dtype.type(math.sqrt(keys.shape[1]))
    look = w["query.kernel"] @ keys.T, keys @ w["query.bias"], values
    blocks: list[Dense] = []
    for (film, film_bias), (weight, bias) in folded.films:
        both = kernel @ film + film_bias
        factor, shift = 1 + both[: len(bias)], both[len(bias) :]
        blocks.append((weight * factor, bias * factor + shift))
    return Encoded(w["config_in.bias"] + kernel, look, blocks)


def encode_nodes(folded: Folded, part: Prepared) -> Floats:
    w = folded.weights
    x = _relu(_dense(w, "node_in", np.concatenate([part.node, w["embedding.table"][part.opcode]], axis=1)))
    outward, inward = normalised(part)
    for kernel, bias in folded.gnn:
        x = x + _relu(np.concatenate([outward @ x, inward @ x], axis=1) @ kernel + bias)
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
        scores[rows] = finish(folded, encoded, config[rows, folded.wide :] @ folded.first)
    return scores


def score_inputs(folded: Folded, encoded: Encoded, inputs: Floats, first: Floats) -> Floats:
    """The scores of (C, D) float32 inputs with a first layer of their own: by a compiled kernel where there is one,
    which goes through all layers with a few configurations at a time, on one thread."""
    if native is None:
        return finish(folded, encoded, inputs @ first)
    keys, offsets, values = encoded.look
    scores, _ = native.ranker_rows_forward(
        inputs[None], 0, first, encoded.bias[None], np.array([0, len(values)]), np.ascontiguousarray(keys.T), offsets,
        values, [kernel[None] for kernel, _ in encoded.blocks], [bias[None] for _, bias in encoded.blocks],
        folded.last,
    )  # fmt: skip
    found: Floats = scores[0].sum(axis=1) if folded.members > 1 else scores[0, :, 0]
    return found


def finish(folded: Folded, encoded: Encoded, hidden: Floats) -> Floats:
    """The scores from what the first layer makes of configurations, (C, members * H), which is written over."""
    h = hidden.reshape(-1, len(encoded.bias))  # (C * members, H)
    nothing = h.dtype.type(0)  # a plain 0 is looked at anew in each call, which takes longer than the comparing
    h += encoded.bias
    np.maximum(h, nothing, out=h)
    h += _attend(h, *encoded.look)
    for kernel, bias in encoded.blocks:
        inner = h @ kernel
        inner += bias
        h += np.maximum(inner, nothing, out=inner)
    scores: Floats = h.reshape(-1, len(folded.out)) @ folded.out
    return scores


def _attend(h: Floats, keys: Floats, bias: Floats, values: Floats) -> Floats:
    logits = keys.T @ h.T  # a row for each of the few nodes: what runs across them runs along memory
    logits += bias[:, None]
    logits -= logits.max(axis=0)
    np.exp(logits, out=logits)
    logits /= logits.sum(axis=0)
    result: Floats = logits.T @ values
    return result


def _dense(w: Weights, name: str, x: Floats) -> Floats:
    return x @ w[f"{name}.kernel"] + w[f"{name}.bias"]


def _relu(x: Floats) -> Floats:
    return np.maximum(x, np.float32(0))
