"""Attention and rotary positions as single operations, as versions 23 and newer of the operations have them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise.errors import DtypeError, ShapeError, UnavailableError
from tilewise.nn import functional as F
from tilewise.onnx.graph import OnnxNode
from tilewise.onnx.operators.base import Value, array, check_size, is_float, operator, read_values, tensor
from tilewise.tensor import Tensor, cat


def _heads(node: OnnxNode, x: Value, count: int) -> Tensor:
    """Reshape (B, T, H·D) to (B, H, T, D); return four axes unchanged."""
    t = tensor(x)
    if t.ndim == 4:
        return t
    if t.ndim != 3 or count < 1 or t.shape[2] % count:
        raise ShapeError(f"{node} cannot cut {t.shape} into {count} heads")
    return t.reshape(t.shape[0], t.shape[1], count, t.shape[2] // count).permute(0, 2, 1, 3)


def _repeated(x: Tensor, heads: int, node: OnnxNode) -> Tensor:
    """Repeat keys or values for every query head that shares them."""
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
    """Compute attention over (B, H, T, D), with cached keys and values in front if the node has them."""
    if not is_float(q, k, v) or len(node.outputs) > 3 or lengths is not None or not set(node.attributes) <= _SUPPORTED:
        raise DtypeError(f"{node} is of a kind (windows, lengths, scores as a result) that tilewise does not compute")
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
        mixed = _shares(scores) @ many_values
    if len(q.shape) == 3:
        mixed = mixed.permute(0, 2, 1, 3).reshape(b, t, h * values.shape[3])
    return (mixed, keys, values)[: len(node.outputs)] if len(node.outputs) > 1 else mixed


def _shares(scores: Tensor) -> Tensor:
    """Compute softmax(scores) over keys; a query whose keys are all masked gets weights of 0."""
    shares = scores.softmax(-1)
    nothing = np.isneginf(scores.data).all(-1, keepdims=True)
    return shares.masked_fill(np.broadcast_to(nothing, shares.shape), 0.0) if nothing.any() else shares


def _masked(node: OnnxNode, scores: Tensor, mask: Value | None, past: int) -> Tensor:
    """Apply soft cap, causal mask and the node's own mask to scores (B, H, T, S)."""
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
    """Rotate pairs of channels by the angles of their positions (RoPE, Su et al. 2021)."""
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


# --- recurrent layers ---


# A step takes the products of its input (1, B, gates · H) and the state; it returns the new state, hidden part first.
Cell = Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]
_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_DEFAULT_ACTIVATIONS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}


def _lstm_cell(recurrent: Tensor, _bias: Tensor, size: int, _node: OnnxNode) -> Cell:
    """Return the step of an LSTM; gates are in the order input, output, forget, cell."""

    def step(x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, cell = state
        gates = x + hidden @ recurrent
        open_gates = gates[:, :, : 3 * size].sigmoid()
        candidate = gates[:, :, 3 * size :].tanh()
        kept_cell = open_gates[:, :, 2 * size :] * cell
        cell = kept_cell + open_gates[:, :, :size] * candidate
        return open_gates[:, :, size : 2 * size] * cell.tanh(), cell

    return step


def _gru_cell(recurrent: Tensor, bias: Tensor, size: int, node: OnnxNode) -> Cell:
    """Return the step of a GRU; `linear_before_reset` applies the reset gate after the product, as PyTorch does."""
    reset_after = bool(node.get("linear_before_reset", 0))
    gate_weights, hidden_weights = recurrent[:, :, : 2 * size], recurrent[:, :, 2 * size :]
    hidden_bias = bias[2 * size :]

    def step(x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (hidden,) = state
        gates = (x[:, :, : 2 * size] + hidden @ gate_weights).sigmoid()
        update, reset = gates[:, :, :size], gates[:, :, size:]
        product = hidden @ hidden_weights if reset_after else (reset * hidden) @ hidden_weights
        product = product + hidden_bias
        candidate = (x[:, :, 2 * size :] + (reset * product if reset_after else product)).tanh()
        return (candidate + update * (hidden - candidate),)

    return step


def _rnn_cell(recurrent: Tensor, _bias: Tensor, _size: int, node: OnnxNode) -> Cell:
    """Make the step of a plain RNN: state = tanh or ReLU of (projected input + state @ recurrent)."""
    relu = tuple(node.get("activations", ("Tanh",)))[:1] == ("Relu",)

    def step(x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        total = x + state[0] @ recurrent
        return (total.relu() if relu else total.tanh(),)

    return step


_CELLS = {"LSTM": _lstm_cell, "GRU": _gru_cell, "RNN": _rnn_cell}


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
    directions, size = _directions(node, x, lengths, states), recurrent.shape[-1]
    steps, batch, gates = x.shape[0], x.shape[1], _GATES[node.op]
    if weight.shape != (len(directions), gates * size, x.shape[2]) or weight.shape[:2] != recurrent.shape[:2]:
        raise ShapeError(f"{node} has weights of shape {weight.shape} for an input of shape {x.shape}")
    check_size([steps, len(directions), batch, gates * size])
    count = 2 if node.op == "LSTM" else 1
    zero = Tensor(np.zeros((1, batch, size), np.float32))
    results: list[tuple[Tensor, ...]] = []
    for d, reverse in enumerate(directions):
        initial = [s for s in states[:count] if s is not None]
        start = tuple(tensor(s)[d : d + 1] for s in initial) or (zero,) * count
        results.append(
            _one_direction(
                node,
                tensor(x),
                (tensor(weight)[d], tensor(recurrent)[d]),
                start,
                reverse=reverse,
                bias=None if bias is None else tensor(bias)[d],
            )
        )
    sequence = cat([r[0].reshape(steps, 1, batch, size) for r in results], 1)
    last = [cat([r[1 + i] for r in results], 0) for i in range(count)]
    return (sequence, *last)[: len(node.outputs)]


def _one_direction(
    node: OnnxNode,
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    state: tuple[Tensor, ...],
    *,
    reverse: bool,
    bias: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return the hidden states (T, B, H) of one direction, then its last state."""
    weight, recurrent = weights
    size, steps = recurrent.shape[-1], x.shape[0]
    gates = weight.shape[0]
    bias = Tensor(np.zeros(2 * gates, np.float32)) if bias is None else bias
    input_bias, hidden_bias = bias[:gates], bias[gates:]
    # The hidden bias of a GRU's candidate is inside the reset gate; all others add to the input's.
    split = 2 * size if node.op == "GRU" else gates
    total_bias = (
        input_bias + cat([hidden_bias[:split], hidden_bias[split:] * 0.0], 0)
        if split < gates
        else input_bias + hidden_bias
    )
    products = x @ weight.transpose(0, 1) + total_bias  # (T, B, gates · H)
    cell = _CELLS[node.op](recurrent.transpose(0, 1).reshape(1, size, gates), hidden_bias, size, node)
    outputs: list[Tensor] = []
    for t in range(steps)[:: -1 if reverse else 1]:
        state = cell(products[t : t + 1], state)
        outputs.append(state[0])
    return (cat(outputs[:: -1 if reverse else 1], 0), *state)


def _directions(node: OnnxNode, x: Value, lengths: Value | None, states: tuple[Value | None, ...]) -> tuple[bool, ...]:
    """Check the settings of a recurrent layer and return for each direction whether it runs backwards."""
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
    if lengths is not None and not np.all(array(lengths) == x.shape[0]):
        raise UnavailableError(f"{node} has sequences of different lengths, which tilewise does not run")
    if any(s is not None for s in states[2 if node.op == "LSTM" else 1 :]):
        raise UnavailableError(f"{node} has peephole weights, which tilewise does not run")
    return directions
