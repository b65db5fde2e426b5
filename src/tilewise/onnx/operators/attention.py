"""Attention and rotary positions as single operations, as versions 23 and newer of the operations have them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tilewise.errors import DtypeError, ShapeError
from tilewise.nn import functional as F
from tilewise.onnx.graph import OnnxNode
from tilewise.onnx.operators.base import Value, array, is_float, operator, read_values, room, tensor
from tilewise.tensor import Tensor, cat


def _heads(node: OnnxNode, x: Value, count: int) -> Tensor:
    """(B, T, H·D) or (B, H, T, D) as the latter."""
    t = tensor(x)
    if t.ndim == 4:
        return t
    if t.ndim != 3 or count < 1 or t.shape[2] % count:
        raise ShapeError(f"{node} cannot cut {t.shape} into {count} heads")
    return t.reshape(t.shape[0], t.shape[1], count, t.shape[2] // count).permute(0, 2, 1, 3)


def _repeated(x: Tensor, heads: int, node: OnnxNode) -> Tensor:
    """Keys or values shared by several heads of queries, once for each."""
    if x.shape[1] == heads:
        return x
    if not x.shape[1] or heads % x.shape[1]:
        raise ShapeError(f"{node} cannot share {x.shape[1]} heads of keys among {heads} of queries")
    return x[:, np.repeat(np.arange(x.shape[1]), heads // x.shape[1])]


_KNOWN = {"is_causal", "kv_num_heads", "q_num_heads", "qk_matmul_output_mode", "scale", "softcap", "softmax_precision"}


@operator("Attention")
def _attention(
    node: OnnxNode,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None = None,
    past_key: Value | None = None,
    past_value: Value | None = None,
    lengths: Value | None = None,
) -> Any:
    if not is_float(q, k, v) or len(node.outputs) > 3 or lengths is not None or not set(node.attributes) <= _KNOWN:
        raise DtypeError(f"{node} is of a kind (windows, lengths, scores as a result) that tilewise does not compute")
    queries = _heads(node, q, node.get("q_num_heads", 0))
    keys, values = (_heads(node, x, node.get("kv_num_heads", 0)) for x in (k, v))
    past = 0
    if past_key is not None and past_value is not None:
        past = past_key.shape[2]
        keys, values = cat([tensor(past_key), keys], 2), cat([tensor(past_value), values], 2)
    b, h, t, d = queries.shape
    many_keys, many_values = _repeated(keys, h, node), _repeated(values, h, node)
    room((b, h, t, many_keys.shape[2]))
    scale = node.get("scale", 1 / math.sqrt(d))
    if mask is None and not node.get("softcap", 0.0) and (not node.get("is_causal", 0) or t + past == keys.shape[2]):
        causal = bool(node.get("is_causal", 0))
        mixed = F.scaled_dot_product_attention(queries, many_keys, many_values, None, causal, scale)
    else:
        scores = _masked(node, (queries * scale) @ many_keys.transpose(), mask, past)
        mixed = _shares(scores) @ many_values
    if len(q.shape) == 3:
        mixed = mixed.permute(0, 2, 1, 3).reshape(b, t, h * values.shape[3])
    return (mixed, keys, values)[: len(node.outputs)] if len(node.outputs) > 1 else mixed


def _shares(scores: Tensor) -> Tensor:
    """Softmax, but for a query that may see nothing, which takes nothing."""
    shares = scores.softmax(-1)
    nothing = np.isneginf(scores.data).all(-1, keepdims=True)
    return shares.masked_fill(np.broadcast_to(nothing, shares.shape), 0.0) if nothing.any() else shares


def _masked(node: OnnxNode, scores: Tensor, mask: Value | None, past: int) -> Tensor:
    t, s = scores.shape[2:]
    softcap = node.get("softcap", 0.0)
    scores = (scores / softcap).tanh() * softcap if softcap else scores
    if node.get("is_causal", 0):  # a query sees the past and what came up to it
        scores = scores.masked_fill(~np.tril(np.ones((t, s), bool), past), -math.inf)
    if mask is None:
        return scores
    allowed = tensor(mask)
    if allowed.shape[-1] < s:  # what a shorter mask does not speak of may not be seen
        widths = [(0, 0)] * (allowed.ndim - 1) + [(0, s - allowed.shape[-1])]
        allowed = allowed.pad(widths, 0.0 if allowed.dtype == bool else -math.inf)
    return scores.masked_fill(~allowed.data, -math.inf) if allowed.dtype == bool else scores + allowed


@operator("RotaryEmbedding")
def _rotary(node: OnnxNode, x: Value, cos: Value, sin: Value, places: Value | None = None) -> Value:
    t = _heads(node, x, node.get("num_heads", 0))  # (B, H, T, D)
    width = node.get("rotary_embedding_dim", 0) or t.shape[3]
    cosines, sines = array(cos), array(sin)
    if places is not None:
        where = read_values(places)
        if where.dtype.kind not in "iu" or (
            where.size and not 0 <= int(where.min()) <= int(where.max()) < len(cosines)
        ):
            raise ShapeError(f"{node} has positions outside its table of {len(cosines)}")
        cosines, sines = cosines[where], sines[where]
    if cosines.ndim != 3 or not 0 < width <= t.shape[3] or width % 2 or cosines.shape[-1] != width // 2:
        raise ShapeError(f"{node} turns {width} of {t.shape} by tables of shape {cosines.shape}")
    by_cos, by_sin = Tensor(cosines[:, None]), Tensor(sines[:, None])  # (B, 1, T, D/2)
    rotary, unrotated = t[..., :width], t[..., width:]
    if node.get("interleaved", 0):
        first, second = rotary[..., 0::2], rotary[..., 1::2]
    else:
        first, second = rotary[..., : width // 2], rotary[..., width // 2 :]
    one, two = first * by_cos - second * by_sin, first * by_sin + second * by_cos
    if node.get("interleaved", 0):
        joined = cat([one.unsqueeze(-1), two.unsqueeze(-1)], -1).reshape(*rotary.shape)
    else:
        joined = cat([one, two], -1)
    out = cat([joined, unrotated], -1) if unrotated.shape[-1] else joined
    return out.permute(0, 2, 1, 3).reshape(*x.shape) if len(x.shape) == 3 else out
