"""Recurrent layers over a sequence, one direction at a time, as ONNX defines LSTM, GRU and RNN.

The steps are written once, for arrays (`Recurrent.forward`) and for tensors (`unrolled`, which also gives gradients).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise.ops.base import Array, Grads, Operation
from tilewise.tensor import Tensor, cat

# Products of a step: LSTM has the gates input, output, forget, candidate; GRU update, reset, candidate.
# "gru_reset_first" applies the reset gate before the product; PyTorch's GRU does it after.
GATES = {"lstm": 4, "gru": 3, "gru_reset_first": 3, "rnn_tanh": 1, "rnn_relu": 1}

Function = Callable[[Any], Any]


def step(
    kind: str, x: Any, state: tuple[Any, ...], weight: Any, bias: Any, sigmoid: Function, activation: Function
) -> tuple[Any, ...]:
    """Compute one time step of a recurrent layer; return the new state, hidden part first.

    `kind` is "LSTM", "GRU" or "RNN". x (B, gates · H) has the products of the input already; `weight` is (H, gates ·
    H). `bias` (H) is added to a GRU's product of the candidate, inside the reset gate.
    """
    hidden, size = state[0], state[0].shape[-1]
    if kind == "gru_reset_first":
        gates = sigmoid(x[:, : 2 * size] + hidden @ weight[:, : 2 * size])
        update, reset = gates[:, :size], gates[:, size:]
        candidate = activation(x[:, 2 * size :] + (reset * hidden) @ weight[:, 2 * size :] + bias)
        return (candidate + update * (hidden - candidate),)
    product = hidden @ weight
    if kind == "lstm":
        gates = x + product
        open_gates, candidate = sigmoid(gates[:, : 3 * size]), activation(gates[:, 3 * size :])
        cell = open_gates[:, 2 * size :] * state[1] + open_gates[:, :size] * candidate
        return open_gates[:, size : 2 * size] * activation(cell), cell
    if kind == "gru":
        gates = sigmoid(x[:, : 2 * size] + product[:, : 2 * size])
        update, reset = gates[:, :size], gates[:, size:]
        candidate = activation(x[:, 2 * size :] + reset * (product[:, 2 * size :] + bias))
        return (candidate + update * (hidden - candidate),)
    return (activation(x + product),)


def input_bias(kind: str, bias: Any, size: int, join: Callable[[list[Any]], Any]) -> Any:
    """Return the part of both biases (gates · H) that can be added to the input's products; `size` is H."""
    gates = GATES[kind] * size
    before, hidden = bias[:gates], bias[gates:]
    # The hidden bias of a GRU's candidate is inside the reset gate; all others add to the input's.
    return before + hidden if GATES[kind] != 3 else join([before[: 2 * size] + hidden[: 2 * size], before[2 * size :]])


def _sigmoid(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)))


class Recurrent(Operation):
    """A layer over x (T, B, I): weights (gates · H, I) and (gates · H, H), biases (2 · gates · H) and a first state.

    The state is hidden (B, H) and, of an LSTM, cell (B, H); zeros by default. The result is the hidden state of every
    step (T, B, H); that of an LSTM has one step more, the last cell state.
    """

    saves = (0, 1, 2, 3)

    def forward(
        self, x: Array, weight: Array, recurrent: Array, bias: Array, *state: Array, kind: str, reverse: bool
    ) -> Array:
        """Compute all time steps with NumPy; `reverse` runs from the last to the first."""
        self.arrays, self.kind, self.reverse = (x, weight, recurrent, bias, *state), kind, reverse
        size, relu = recurrent.shape[-1], kind == "rnn_relu"
        products = x @ weight.T + input_bias(kind, bias, size, np.concatenate)
        matrix, shift = np.ascontiguousarray(recurrent.T), bias[-size:]
        activation: Function = (lambda v: np.maximum(v, 0)) if relu else np.tanh
        zero = np.zeros((x.shape[1], size), products.dtype)
        state = state or (zero,) * 2
        hidden = np.empty((len(x) + (kind == "lstm"), *zero.shape), products.dtype)
        for t in range(len(x))[:: -1 if reverse else 1]:
            state = step(kind, products[t], state, matrix, bias=shift, sigmoid=_sigmoid, activation=activation)
            hidden[t] = state[0]
        if kind == "lstm":
            hidden[-1] = state[1]
        return hidden

    def backward(self, grad: Array) -> Grads:
        """Return the gradients by running the steps again with autograd."""
        inputs = [Tensor(array, requires_grad=True) for array in self.arrays]
        unrolled(*inputs, kind=self.kind, reverse=self.reverse).backward(grad)
        return tuple(None if tensor.grad is None else tensor.grad.data for tensor in inputs)


def unrolled(
    x: Tensor, weight: Tensor, recurrent: Tensor, bias: Tensor, *state: Tensor, kind: str, reverse: bool
) -> Tensor:
    """Compute the same as `Recurrent` by tensor operations, one step at a time, for its gradient."""
    size, relu = recurrent.shape[-1], kind == "rnn_relu"
    products = x @ weight.transpose(0, 1) + input_bias(kind, bias, size, lambda biases: cat(biases, 0))
    matrix, shift = recurrent.transpose(0, 1), bias[-size:]
    activation = Tensor.relu if relu else Tensor.tanh
    state = state or (Tensor(np.zeros((x.shape[1], size), products.dtype)),) * 2
    hidden: list[Tensor] = []
    for t in range(x.shape[0])[:: -1 if reverse else 1]:
        state = step(kind, products[t], state, matrix, bias=shift, sigmoid=Tensor.sigmoid, activation=activation)
        hidden.append(state[0].reshape(1, *state[0].shape))
    last = [state[1].reshape(1, *state[1].shape)] if kind == "lstm" else []
    return cat([*hidden[:: -1 if reverse else 1], *last], 0)
