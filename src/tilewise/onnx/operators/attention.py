"""Attention and rotary positions as single operations, as versions 23 and newer of the operations have them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tilewise.errors import DtypeError, ShapeError, UnavailableError
from tilewise.nn import functional as F
from tilewise.onnx.graph import OnnxNode
from tilewise.onnx.operators.base import Value, check_size, is_float, operator, read_values, tensor
from tilewise.tensor import Tensor, apply, cat


def _heads(node: OnnxNode, x: Value, count: int) -> Tensor:
    """Reshape (B, T, H·D) to (B, H, T, D); return four axes unchanged."""
    t = tensor(x)
    if t.ndim == 4:
        return t
    if t.ndim != 3 or count < 1 or t.shape[2] % count:
        raise ShapeError(f"{node} cannot split {t.shape} into {count} heads")
    return t.reshape(t.shape[0], t.shape[1], count, t.shape[2] // count).permute(0, 2, 1, 3)


def _repeated(x: Tensor, heads: int, node: OnnxNode) -> Tensor:
    """Repeat the heads of keys or values (B, H', T, D) for the query heads that share them: `heads` in all."""
    if x.shape[1] == heads:
        return x
    if not x.shape[1] or heads % x.shape[1]:
        raise ShapeError(f"{node} cannot share {x.shape[1]} heads of keys among {heads} of queries")
    return x[:, np.repeat(np.arange(x.shape[1]), heads // x.shape[1])]


_SUPPORTED = {
    "is_causal",
    "kv_num_heads",
    "q_num_heads",
    "qk_matmul_output_mode",
    "scale",
    "softcap",
    "softmax_precision",
}


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
    """Compute attention over (B, H, T, D); cached keys and values, if any, come before the new ones."""
    if not is_float(q, k, v) or len(node.outputs) > 3 or lengths is not None or not set(node.attributes) <= _SUPPORTED:
        raise DtypeError(f"{node} uses windows, lengths or scores as a result, which tilewise does not support")
    queries = _heads(node, q, node.get("q_num_heads", 0))
    keys, values = (_heads(node, x, node.get("kv_num_heads", 0)) for x in (k, v))
    past = 0
    if past_key is not None and past_value is not None:
        past = past_key.shape[2]
        keys, values = cat([tensor(past_key), keys], 2), cat([tensor(past_value), values], 2)
    b, h, t, d = queries.shape
    many_keys, many_values = _repeated(keys, h, node), _repeated(values, h, node)
    check_size((b, h, t, many_keys.shape[2]))
    scale = node.get("scale", 1 / math.sqrt(d))
    if mask is None and not node.get("softcap", 0.0) and (not node.get("is_causal", 0) or t + past == keys.shape[2]):
        causal = bool(node.get("is_causal", 0))
        mixed = F.scaled_dot_product_attention(queries, many_keys, many_values, None, causal, scale)
    else:
        scores = _masked(node, (queries * scale) @ many_keys.transpose(), mask, past)
        mixed = _safe_softmax(scores) @ many_values
    if len(q.shape) == 3:
        mixed = mixed.permute(0, 2, 1, 3).reshape(b, t, h * values.shape[3])
    return (mixed, keys, values)[: len(node.outputs)] if len(node.outputs) > 1 else mixed


def _safe_softmax(scores: Tensor) -> Tensor:
    """Compute softmax(scores) over keys, with weights of 0 for a query whose keys are all masked."""
    shares = scores.softmax(-1)
    nothing = np.isneginf(scores.data).all(-1, keepdims=True)
    return shares.masked_fill(np.broadcast_to(nothing, shares.shape), 0.0) if nothing.any() else shares


def _masked(node: OnnxNode, scores: Tensor, mask: Value | None, past: int) -> Tensor:
    """Apply the soft cap, causal mask and the node's mask to scores; `past` is the number of cached keys."""
    t, s = scores.shape[2:]
    softcap = node.get("softcap", 0.0)
    scores = (scores / softcap).tanh() * softcap if softcap else scores
    if node.get("is_causal", 0):  # a query sees the past and what came up to it
        scores = scores.masked_fill(~np.tril(np.ones((t, s), bool), past), -math.inf)
    if mask is None:
        return scores
    allowed = tensor(mask)
    if allowed.shape[-1] < s:  # keys beyond a shorter mask are masked
        widths = [(0, 0)] * (allowed.ndim - 1) + [(0, s - allowed.shape[-1])]
        allowed = allowed.pad(widths, 0.0 if allowed.dtype == bool else -math.inf)
    return scores.masked_fill(~allowed.data, -math.inf) if allowed.dtype == bool else scores + allowed


@operator("RotaryEmbedding")
def _rotary(node: OnnxNode, x: Value, cos: Value, sin: Value, places: Value | None = None) -> Value:
    """Rotate pairs of channels by cos and sin at the positions `places` (rotary embedding, Su et al. 2021)."""
    t = _heads(node, x, node.get("num_heads", 0))  # (B, H, T, D)
    width = node.get("rotary_embedding_dim", 0) or t.shape[3]
    cosines, sines = read_values(cos), read_values(sin)
    if places is not None:
        where = read_values(places)
        if where.dtype.kind not in "iu" or (
            where.size and not 0 <= int(where.min()) <= int(where.max()) < len(cosines)
        ):
            raise ShapeError(f"{node} has positions outside its table of {len(cosines)}")
        cosines, sines = cosines[where], sines[where]
    if cosines.ndim != 3 or not 0 < width <= t.shape[3] or width % 2 or cosines.shape[-1] != width // 2:
        raise ShapeError(f"{node} rotates {width} of {t.shape} by tables of shape {cosines.shape}")
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


# --- recurrent layers ---


_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
_DEFAULT_ACTIVATIONS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}


@operator("LSTM", "GRU", "RNN")
def _recurrent(
    node: OnnxNode,
    x: Value,
    weight: Value,
    recurrent: Value,
    bias: Value | None = None,
    lengths: Value | None = None,
    *states: Value | None,
) -> Any:
    """Run a recurrent layer over (T, B, I) with weights (D, gates · H, I) and (D, gates · H, H)."""
    from tilewise.nn.recurrent import GATES, Recurrent, unrolled  # late: few networks are recurrent

    directions, size = _directions(node, x, lengths, states), recurrent.shape[-1]
    relu = tuple(node.get("activations", ("Tanh",)))[:1] == ("Relu",)
    kind = {"LSTM": "lstm", "GRU": "gru", "RNN": "rnn_relu" if relu else "rnn_tanh"}[node.op]
    steps, batch, gates = x.shape[0], x.shape[1], GATES[kind] * size
    if weight.shape != (len(directions), gates, x.shape[2]) or weight.shape[:2] != recurrent.shape[:2]:
        raise ShapeError(f"{node} has weights of shape {weight.shape} for an input of shape {x.shape}")
    check_size([steps, len(directions), batch, gates])
    count = 2 if node.op == "LSTM" else 1
    initial = [tensor(s) for s in states[:count] if s is not None]
    if len(initial) not in (0, count):
        raise UnavailableError(f"{node} has a first hidden state without a cell state, or the reverse")
    shift = Tensor(np.zeros((len(directions), 2 * gates), np.float32)) if bias is None else tensor(bias)
    hidden: list[Tensor] = []
    last: list[list[Tensor]] = []
    for d, reverse in enumerate(directions):
        operands = [tensor(x), tensor(weight)[d], tensor(recurrent)[d], shift[d], *(s[d] for s in initial)]
        if node.op == "GRU" and not node.get("linear_before_reset", 0):
            result = unrolled(*operands, kind="gru_reset_first", reverse=reverse)
        else:
            result = apply(Recurrent, *operands, kind=kind, reverse=reverse)
        hidden.append(result[:steps].reshape(steps, 1, batch, size))
        end = 0 if reverse else steps - 1
        last.append([result[end : end + 1], *([result[steps:]] if node.op == "LSTM" else [])])
    results = [cat(hidden, 1), *(cat([ends[i] for ends in last], 0) for i in range(count))]
    return tuple(results)[: len(node.outputs)]


def _directions(node: OnnxNode, x: Value, lengths: Value | None, states: tuple[Value | None, ...]) -> tuple[bool, ...]:
    """Check a recurrent layer's settings; return, for each direction, whether it runs backwards."""
    directions = _DIRECTIONS.get(node.get("direction", "forward"))
    usual = _DEFAULT_ACTIVATIONS[node.op] * len(directions or ())
    activations = tuple(node.get("activations", usual)) or usual
    plain = activations == usual or (node.op == "RNN" and set(activations) == {"Relu"})
    if directions is None or not plain or node.get("layout", 0) or node.get("clip", 0.0) or node.get("input_forget", 0):
        raise UnavailableError(
            f"{node} has settings that tilewise does not run: activations, clip, layout or input_forget"
        )
    if len(x.shape) != 3 or not x.shape[0]:
        raise ShapeError(f"{node} runs over a sequence (T, B, I), not {x.shape}")
    if lengths is not None and not np.all(read_values(lengths) == x.shape[0]):
        raise UnavailableError(f"{node} has sequences of different lengths, which tilewise does not run")
    if any(s is not None for s in states[2 if node.op == "LSTM" else 1 :]):
        raise UnavailableError(f"{node} has peephole weights, which tilewise does not run")
    return directions
