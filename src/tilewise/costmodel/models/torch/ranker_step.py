"""One step of TileRanker's training on arrays: scores and gradients, with the way back written out.

A batch is a few small graphs and a few hundred configurations. What every configuration goes through is done by
compiled kernels, slate by slate, each while it is in the cache. What is a kernel's own is folded into the weights that
those read: scale and shift of FiLM become a slate's own matrix and bias, and the query becomes part of the keys. That
leaves little but bookkeeping, and it is quicker on arrays than through autograd.
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
from tilewise.costmodel.models.numpy.ranker import first_layers, last_layers
from tilewise.costmodel.models.torch.ragged import Batch, Matrix, product
from tilewise.costmodel.train.losses import CombinedLoss

Floats = npt.NDArray[np.float32]
Arrays = Mapping[str, Floats]
_kernels: Any = native  # the caller has seen that they are there


def learn_ranker(model: nn.Module, batch: Batch, loss: CombinedLoss, dropout: float) -> tuple[float, Tensor]:
    """Adds the loss's gradient to the parameters'; gives the loss and the scores (K, members, C)."""
    step = Step.forward({name: p.detach().numpy() for name, p in model.named_parameters()}, batch, dropout)
    members, slots = step.scores.shape[2], step.scores.shape[1]
    scores = step.scores.transpose(0, 2, 1)
    target, mask = (np.repeat(part.numpy(), members, axis=0) for part in (batch.target, batch.mask))
    value, slope = loss.with_gradient(
        scores.reshape(-1, slots).astype(np.float64), target.astype(np.float64), mask
    )  # each member learns by itself
    slope = slope.reshape(scores.shape).transpose(0, 2, 1)
    grads = step.back(np.ascontiguousarray(slope, np.float32))
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        own = parameter.grad.numpy()
        own += grads[name].reshape(own.shape)
    return value, torch.from_numpy(scores)


@dataclass(eq=False)
class Step:
    """One batch on its way through the network."""

    weights: Arrays
    batch: Batch
    inputs: Floats  # (N, F + E)
    nodes: list[Floats]  # (N, d) after each layer
    near: list[Floats]  # (N, 2 d) that each layer of the graph network reads
    added: list[Floats]  # (N, d) that it adds
    joined: Floats  # (K, 2 d + G) that the kernel's layer reads
    keep: Floats | None  # what dropout left of it
    kernel: Floats  # (K, H)
    keys: Floats  # (N, d)
    scales: list[Floats]  # (K, H) of each block
    arguments: tuple[Any, ...]  # of the compiled kernels
    scores: Floats  # (K, C, members)
    saved: Floats

    @classmethod
    def forward(cls, w: Arrays, batch: Batch, dropout: float) -> Step:
        inputs = np.concatenate([batch.node.numpy(), w["embedding.table"][batch.opcode.numpy()]], axis=1)
        nodes, near, added = _graph(w, batch, inputs)
        width = w["kernel_in.kernel"].shape[0] - 2 * nodes[-1].shape[1]
        counts = batch.node_counts.astype(np.float32)[:, None]
        total = _times(batch.pooling.forward, nodes[-1])
        joined = np.concatenate([total / counts, total / np.sqrt(counts), batch.config[:, 0, :width].numpy()], axis=1)
        keep = _kept(joined.shape, dropout)
        joined = joined if keep is None else joined * keep
        kernel = _dense(w, "kernel_in", joined, activation="relu")
        keys = _dense(w, "key", nodes[-1]) / np.float32(math.sqrt(nodes[-1].shape[1]))
        scales, blocks, biases = [], [], []
        for name in _layers(w, "film"):
            scale, shift = np.split(_dense(w, name, kernel), 2, axis=1)
            block = name.replace("film", "blocks")
            scales.append(scale + np.float32(1))
            blocks.append(w[f"{block}.kernel"] * scales[-1][:, None])
            biases.append(shift + w[f"{block}.bias"] * scales[-1])
        arguments = (
            batch.config.contiguous().numpy(), width, first_layers(w), kernel + w["config_in.bias"],
            np.concatenate([[0], np.cumsum(batch.node_counts)]), _kernels.matmul(keys, w["query.kernel"].T),
            _kernels.matmul(keys, w["query.bias"]), _dense(w, "value", nodes[-1]), blocks, biases,
            last_layers(w["out"]),
        )  # fmt: skip
        scores, saved = _kernels.ranker_rows_forward(*arguments)
        return cls(w, batch, inputs, nodes, near, added, joined, keep, kernel, keys, scales, arguments, scores, saved)

    def back(self, grad: Floats) -> dict[str, Floats]:
        """The gradients of all weights by name, from that of the scores."""
        w = self.weights
        hidden, first, keys, offsets, values, blocks, biases, last = _kernels.ranker_rows_backward(
            grad, self.saved, *self.arguments
        )
        found = self._first_back(hidden) | {"config_in.bias": first.sum(axis=0), "out": _last_back(last)}
        to_kernel = first
        for number, name in enumerate(_layers(w, "film")):
            more, grads = self._folded_back(number, name, blocks[number], biases[number])
            to_kernel, found = to_kernel + more, found | grads
        to_nodes, grads = _dense_back(w, "value", self.nodes[-1], values)
        found |= grads
        found["query.kernel"] = _kernels.matmul(keys.T, self.keys)
        found["query.bias"] = _kernels.matmul(offsets, self.keys)
        to_keys = _kernels.matmul(keys, w["query.kernel"]) + offsets[:, None] * w["query.bias"]
        more, grads = _dense_back(w, "key", self.nodes[-1], to_keys / np.float32(math.sqrt(to_keys.shape[1])))
        to_nodes, found = to_nodes + more, found | grads
        more, grads = self._kernel_back(to_kernel)
        return found | grads | self._graph_back(to_nodes + more)

    def _first_back(self, hidden: Floats) -> dict[str, Floats]:
        """Back through `first_layers`: the members' kernels are one, with its rows scaled."""
        w, config, skipped = self.weights, *self.arguments[:2]
        own = config.reshape(-1, config.shape[-1])[:, skipped:]
        members, columns = len(w["scaling"]), own.shape[1]
        wide = _kernels.matmul(own.T, hidden.reshape(len(own), -1)).reshape(columns, members, -1).transpose(1, 0, 2)
        kernel = w["config_in.kernel"]
        return {
            "scaling": (wide * kernel).sum(axis=2)[:, None],
            "config_in.kernel": (wide * w["scaling"].transpose(0, 2, 1)).sum(axis=0),
        }

    def _folded_back(self, number: int, film: str, weight: Floats, bias: Floats) -> tuple[Floats, dict[str, Floats]]:
        """Back through a block's own weight = kernel * scale and bias = shift + bias * scale."""
        block, scale = film.replace("film", "blocks"), self.scales[number]
        to_scale = (weight * self.weights[f"{block}.kernel"]).sum(axis=1) + bias * self.weights[f"{block}.bias"]
        to_kernel, grads = _dense_back(self.weights, film, self.kernel, np.concatenate([to_scale, bias], axis=1))
        grads[f"{block}.kernel"] = (weight * scale[:, None]).sum(axis=0)
        grads[f"{block}.bias"] = (bias * scale).sum(axis=0)
        return to_kernel, grads

    def _kernel_back(self, grad: Floats) -> tuple[Floats, dict[str, Floats]]:
        """The gradient of the nodes, and of the kernel's layer."""
        to_joined, grads = _dense_back(self.weights, "kernel_in", self.joined, grad * (self.kernel > 0))
        to_joined = to_joined if self.keep is None else to_joined * self.keep
        counts = self.batch.node_counts.astype(np.float32)[:, None]
        width = self.nodes[-1].shape[1]
        to_total: Any = to_joined[:, :width] / counts + to_joined[:, width : 2 * width] / np.sqrt(counts)
        return _times(self.batch.pooling.transposed, to_total), grads

    def _graph_back(self, grad: Floats) -> dict[str, Floats]:
        w, found = self.weights, dict[str, Floats]()
        outward, inward = (sparse.transposed for sparse in self.batch.normalised)
        width = grad.shape[1]
        for number, name in reversed(list(enumerate(_layers(w, "gnn")))):
            near, grads = _dense_back(w, name, self.near[number], grad * (self.added[number] > 0))
            found |= grads
            grad = grad + _times(outward, near[:, :width]) + _times(inward, near[:, width:])
        to_inputs, grads = _dense_back(w, "node_in", self.inputs, grad * (self.nodes[0] > 0))
        table = np.zeros_like(w["embedding.table"])
        to_embedded = np.ascontiguousarray(to_inputs[:, self.batch.node.shape[1] :])
        _kernels.embedding_grad(to_embedded, self.batch.opcode.numpy(), table)
        return found | grads | {"embedding.table": table}


def _graph(w: Arrays, batch: Batch, inputs: Floats) -> tuple[list[Floats], list[Floats], list[Floats]]:
    nodes, near, added = [_dense(w, "node_in", inputs, activation="relu")], [], []
    outward, inward = (sparse.forward for sparse in batch.normalised)
    for name in _layers(w, "gnn"):
        near.append(np.concatenate([_times(outward, nodes[-1]), _times(inward, nodes[-1])], axis=1))
        added.append(_dense(w, name, near[-1], activation="relu"))
        nodes.append(nodes[-1] + added[-1])
    return nodes, near, added


def _layers(w: Arrays, group: str) -> list[str]:
    count = sum(name.startswith(f"{group}.") and name.endswith(".kernel") for name in w)
    return [f"{group}.{number}" for number in range(count)]


def _dense(w: Arrays, name: str, x: Floats, **more: str) -> Floats:
    result: Floats = _kernels.matmul(x, w[f"{name}.kernel"], bias=w[f"{name}.bias"], **more)
    return result


def _dense_back(w: Arrays, name: str, x: Floats, grad: Floats) -> tuple[Floats, dict[str, Floats]]:
    own = {f"{name}.kernel": _kernels.matmul(x.T, grad), f"{name}.bias": grad.sum(axis=0)}
    return _kernels.matmul(grad, w[f"{name}.kernel"].T), own


def _times(matrix: Matrix, x: Floats) -> Floats:
    found: Floats = product(matrix, torch.from_numpy(np.ascontiguousarray(x))).numpy()
    return found


def _kept(shape: tuple[int, ...], dropout: float) -> Floats | None:
    """From torch's generator, which is seeded for each epoch."""
    if not dropout:
        return None
    kept: Floats = torch.empty(shape).bernoulli_(1 - dropout).div_(1 - dropout).numpy()
    return kept


def _last_back(last: Floats) -> Floats:
    every = np.arange(last.shape[2])
    return np.asarray(last.sum(axis=0).reshape(len(every), -1, len(every))[every, :, every])
