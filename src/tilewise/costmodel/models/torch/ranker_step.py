"""One training step of TileRanker on arrays: scores and gradients with a hand-written backward pass.

A batch is a few small graphs and a few hundred configurations. Compiled kernels compute everything that depends on the
configuration, kernel by kernel while its rows are in the cache. What depends on the kernel alone is folded into their
weights: FiLM's scale and shift become one weight and bias per kernel, the attention query is multiplied into the keys.
The rest is so little arithmetic that arrays are faster than autograd.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tilewise._extension import native
from tilewise.costmodel.models.numpy.ranker import first_layers
from tilewise.costmodel.models.torch.ragged import KernelBatch, product
from tilewise.costmodel.training.losses import CombinedLoss

Floats = npt.NDArray[np.float32]
Arrays = Mapping[str, Floats]
_kernels: Any = native  # the caller checks `TileRanker.compiled`


def learn_ranker(model: nn.Module, batch: KernelBatch, loss: CombinedLoss, dropout: float) -> tuple[float, Tensor]:
    """Run one training step's forward and backward pass: add gradients, return loss, scores (K, members, C)."""
    step = RankerStep.forward({name: p.detach().numpy() for name, p in model.named_parameters()}, batch, dropout)
    members, slots = step.scores.shape[2], step.scores.shape[1]
    scores = step.scores.transpose(0, 2, 1)
    target, mask = (np.repeat(x.numpy(), members, axis=0) for x in (batch.target, batch.mask))
    # Each member has its own loss.
    value, grad = loss.with_gradient(scores.reshape(-1, slots).astype(np.float64), target.astype(np.float64), mask)
    grad = grad.reshape(scores.shape).transpose(0, 2, 1)
    grads = step.backward(np.ascontiguousarray(grad, np.float32))
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        total = parameter.grad.numpy()
        total += grads[name].reshape(total.shape)
    return value, torch.from_numpy(scores)


@dataclass(eq=False)
class RankerStep:
    """Activations of one batch's forward pass. K kernels, N nodes, d node units, H hidden units, G global inputs."""

    weights: Arrays
    batch: KernelBatch
    inputs: Floats  # (N, F + E)
    nodes: list[Floats]  # (N, d) after each layer
    aggregated: list[Floats]  # (N, 2 d): input of each graph layer
    updates: list[Floats]  # (N, d): output of each graph layer, which is added to the nodes
    joined: Floats  # (K, 2 d + G): input of the kernel's layer
    dropout_scale: Floats | None  # (K, 2 d + G): 0 where dropout removed an input
    kernel: Floats  # (K, H)
    keys: Floats  # (N, d)
    scales: list[Floats]  # (K, H) of each block
    arguments: tuple[Any, ...]  # of `ranker_rows_forward`
    scores: Floats  # (K, C, members)
    saved: Floats  # activations of the compiled kernels

    @classmethod
    def forward(cls, w: Arrays, batch: KernelBatch, dropout: float) -> RankerStep:
        """Run the forward pass with weights `w`."""
        # Graph network and the kernel's vector.
        inputs = np.concatenate([batch.node.numpy(), w["embedding.table"][batch.opcode.numpy()]], axis=1)
        nodes, aggregated, updates = _encode_nodes(w, batch, inputs)
        width = w["kernel_in.kernel"].shape[0] - 2 * nodes[-1].shape[1]
        counts = batch.node_counts.astype(np.float32)[:, None]
        total = _multiply(batch.pooling.forward, nodes[-1])
        joined = np.concatenate([total / counts, total / np.sqrt(counts), batch.config[:, 0, :width].numpy()], axis=1)
        dropout_scale = _dropout_scale(joined.shape, dropout)
        joined = joined if dropout_scale is None else joined * dropout_scale
        kernel = _dense(w, "kernel_in", joined, activation="relu")
        # Attention keys, scaled as in Vaswani et al. 2017.
        keys = _dense(w, "key", nodes[-1]) / np.float32(math.sqrt(nodes[-1].shape[1]))
        scales, blocks, biases = [], [], []
        # Fold FiLM's scale and shift into the weights of each block.
        for name in _layer_names(w, "film"):
            scale, shift = np.split(_dense(w, name, kernel), 2, axis=1)
            block = name.replace("film", "blocks")
            scales.append(scale + np.float32(1))
            blocks.append(w[f"{block}.kernel"] * scales[-1][:, None])
            biases.append(shift + w[f"{block}.bias"] * scales[-1])
        arguments = (
            batch.config.contiguous().numpy(), width, first_layers(w), kernel + w["config_in.bias"],
            np.concatenate([[0], np.cumsum(batch.node_counts)]), _kernels.matmul(keys, w["query.kernel"].T),
            _kernels.matmul(keys, w["query.bias"]), _dense(w, "value", nodes[-1]), blocks, biases,
            _last_layers(w["out"]),
        )  # fmt: skip
        # The compiled kernels compute everything that depends on configurations.
        scores, saved = _kernels.ranker_rows_forward(*arguments)
        if "linear" in w:
            scores += (arguments[0][..., width:] @ w["linear"])[..., None]
        return cls(
            weights=w, batch=batch, inputs=inputs, nodes=nodes, aggregated=aggregated, updates=updates, joined=joined,
            dropout_scale=dropout_scale, kernel=kernel, keys=keys, scales=scales, arguments=arguments, scores=scores,
            saved=saved,
        )  # fmt: skip

    def backward(self, grad: Floats) -> dict[str, Floats]:
        """Return the gradients of all weights by name, from the gradient of the scores."""
        w = self.weights
        hidden, first_bias, keys, key_bias, values, blocks, biases, last = _kernels.ranker_rows_backward(
            grad, self.saved, *self.arguments
        )
        grads = self._first_layer_grad(hidden)
        grads |= {"config_in.bias": first_bias.sum(axis=0), "out": _last_layer_grad(last)}
        if "linear" in w:
            config, width = self.arguments[:2]
            grads["linear"] = np.tensordot(grad.sum(axis=2), config[..., width:], 2)
        # FiLM and the blocks.
        grad_kernel = first_bias
        for number, name in enumerate(_layer_names(w, "film")):
            from_film, film_grads = self._film_grad(number, name, blocks[number], biases[number])
            grad_kernel, grads = grad_kernel + from_film, grads | film_grads
        # Attention: values, query and keys.
        grad_nodes, value_grads = _dense_grad(w, "value", self.nodes[-1], values)
        grads |= value_grads
        grads["query.kernel"] = _kernels.matmul(keys.T, self.keys)
        grads["query.bias"] = _kernels.matmul(key_bias, self.keys)
        grad_keys = _kernels.matmul(keys, w["query.kernel"]) + key_bias[:, None] * w["query.bias"]
        grad_keys = grad_keys / np.float32(math.sqrt(grad_keys.shape[1]))
        from_keys, key_grads = _dense_grad(w, "key", self.nodes[-1], grad_keys)
        grad_nodes, grads = grad_nodes + from_keys, grads | key_grads
        # The kernel's vector and the graph network.
        from_kernel, kernel_grads = self._kernel_grad(grad_kernel)
        return grads | kernel_grads | self._graph_grad(grad_nodes + from_kernel)

    def _first_layer_grad(self, hidden: Floats) -> dict[str, Floats]:
        """Backpropagate through `first_layers`: gradients of the shared kernel and each row scale."""
        w, config, global_width = self.weights, *self.arguments[:2]
        # The kernel-wide columns do not enter the first layer.
        own = config.reshape(-1, config.shape[-1])[:, global_width:]
        members, columns = len(w["scaling"]), own.shape[1]
        member_grads = _kernels.matmul(own.T, hidden.reshape(len(own), -1))  # (D, members * H)
        member_grads = member_grads.reshape(columns, members, -1).transpose(1, 0, 2)
        kernel = w["config_in.kernel"]
        return {
            "scaling": (member_grads * kernel).sum(axis=2)[:, None],
            "config_in.kernel": (member_grads * w["scaling"].transpose(0, 2, 1)).sum(axis=0),
        }

    def _film_grad(self, number: int, film: str, weight: Floats, bias: Floats) -> tuple[Floats, dict[str, Floats]]:
        """Backpropagate through block `number`'s folded weight = kernel * scale and bias = shift + bias * scale.

        Takes the gradients of both; returns those of the FiLM layer `film`'s output, and of the weights by name.
        """
        block, scale = film.replace("film", "blocks"), self.scales[number]
        grad_scale = (weight * self.weights[f"{block}.kernel"]).sum(axis=1) + bias * self.weights[f"{block}.bias"]
        grad_kernel, grads = _dense_grad(self.weights, film, self.kernel, np.concatenate([grad_scale, bias], axis=1))
        grads[f"{block}.kernel"] = (weight * scale[:, None]).sum(axis=0)
        grads[f"{block}.bias"] = (bias * scale).sum(axis=0)
        return grad_kernel, grads

    def _kernel_grad(self, grad: Floats) -> tuple[Floats, dict[str, Floats]]:
        """Backpropagate through the kernel encoding: gradients of the nodes, and of its layer by name."""
        grad_joined, grads = _dense_grad(self.weights, "kernel_in", self.joined, grad * (self.kernel > 0))
        grad_joined = grad_joined if self.dropout_scale is None else grad_joined * self.dropout_scale
        counts = self.batch.node_counts.astype(np.float32)[:, None]
        width = self.nodes[-1].shape[1]
        grad_total: Any = grad_joined[:, :width] / counts + grad_joined[:, width : 2 * width] / np.sqrt(counts)
        return _multiply(self.batch.pooling.transposed, grad_total), grads

    def _graph_grad(self, grad: Floats) -> dict[str, Floats]:
        """Return the gradients of the graph network's weights, given that of its output nodes."""
        w, grads = self.weights, dict[str, Floats]()
        outward, inward = (matrix.transposed for matrix in self.batch.normalized_adjacency)
        width = grad.shape[1]
        for number, name in reversed(list(enumerate(_layer_names(w, "gnn")))):
            aggregated, layer_grads = _dense_grad(w, name, self.aggregated[number], grad * (self.updates[number] > 0))
            grads |= layer_grads
            grad = grad + _multiply(outward, aggregated[:, :width]) + _multiply(inward, aggregated[:, width:])
        grad_inputs, input_grads = _dense_grad(w, "node_in", self.inputs, grad * (self.nodes[0] > 0))
        # Scatter-add the nodes' gradients to their opcodes.
        table = np.zeros_like(w["embedding.table"])
        grad_embedding = np.ascontiguousarray(grad_inputs[:, self.batch.node.shape[1] :])
        _kernels.embedding_grad(grad_embedding, self.batch.opcode.numpy(), table)
        return grads | input_grads | {"embedding.table": table}


def _encode_nodes(w: Arrays, batch: KernelBatch, inputs: Floats) -> tuple[list[Floats], list[Floats], list[Floats]]:
    """Run the graph network; return nodes after each layer, and each layer's aggregated input and its output."""
    nodes, aggregated, updates = [_dense(w, "node_in", inputs, activation="relu")], [], []
    outward, inward = (matrix.forward for matrix in batch.normalized_adjacency)
    for name in _layer_names(w, "gnn"):
        aggregated.append(np.concatenate([_multiply(outward, nodes[-1]), _multiply(inward, nodes[-1])], axis=1))
        updates.append(_dense(w, name, aggregated[-1], activation="relu"))
        nodes.append(nodes[-1] + updates[-1])
    return nodes, aggregated, updates


def _layer_names(w: Arrays, group: str) -> list[str]:
    """List the layers `group.0`, `group.1` and so on."""
    count = sum(name.startswith(f"{group}.") and name.endswith(".kernel") for name in w)
    return [f"{group}.{number}" for number in range(count)]


def _dense(w: Arrays, name: str, x: Floats, **options: str) -> Floats:
    result: Floats = _kernels.matmul(x, w[f"{name}.kernel"], bias=w[f"{name}.bias"], **options)
    return result


def _dense_grad(w: Arrays, name: str, x: Floats, grad: Floats) -> tuple[Floats, dict[str, Floats]]:
    """Backpropagate through a dense layer; returns the gradients of its input and of its weights."""
    weight_grads = {f"{name}.kernel": _kernels.matmul(x.T, grad), f"{name}.bias": grad.sum(axis=0)}
    return _kernels.matmul(grad, w[f"{name}.kernel"].T), weight_grads


def _multiply(matrix: Tensor, x: Floats) -> Floats:
    result: Floats = product(matrix, torch.from_numpy(np.ascontiguousarray(x))).numpy()
    return result


def _dropout_scale(shape: tuple[int, ...], dropout: float) -> Floats | None:
    """Draw a dropout mask, scaled to preserve the mean, from torch's seeded generator; None for 0."""
    if not dropout:
        return None
    mask: Floats = torch.empty(shape).bernoulli_(1 - dropout).div_(1 - dropout).numpy()
    return mask


def _last_layers(out: Floats) -> Floats:
    """Arrange the members' last layers (members, H, 1) as a block-diagonal matrix (members * H, members)."""
    every = np.arange(len(out))
    last = np.zeros((len(out), out.shape[1], len(out)), out.dtype)
    last[every, :, every] = out[:, :, 0]
    return last.reshape(-1, len(out))


def _last_layer_grad(last: Floats) -> Floats:
    """Return the gradient of the last layers from that of the block-diagonal matrix of `_last_layers`."""
    every = np.arange(last.shape[2])
    return np.asarray(last.sum(axis=0).reshape(len(every), -1, len(every))[every, :, every])
