"""Recurrent layers: LSTM, GRU and RNN, unrolled over the steps of the sequence.

The products of the inputs are computed for all steps at once; only the products of the hidden state run step by step.
Gates are stacked as ONNX stores them: LSTM input, output, forget, cell; GRU update, reset, hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise.errors import ShapeError, UnavailableError
from tilewise.onnx.graph import OnnxNode
from tilewise.onnx.operators.base import Value, array, operator, room, tensor
from tilewise.tensor import Tensor, cat

# A step takes the products of its input (1, B, gates · H) and the state; it returns the new state, hidden part first.
Cell = Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]
_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_DEFAULT_ACTIVATIONS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}


def _lstm_cell(recurrent: Tensor, _bias: Tensor, size: int, _node: OnnxNode) -> Cell:
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
    room([steps, len(directions), batch, gates * size])
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
