"""EarlyJoinSAGE as one autograd node around the compiled kernels.

The kernels take a graph's (node, configuration) pairs through all layers while they are in the cache. Before its
activation the first layer is linear, so it is passed as two products, one over nodes and one over configurations; the
opcode embedding is multiplied once per opcode instead of once per node. Forward and backward pass are written on
arrays: on small batches autograd's bookkeeping would take as long as the arithmetic. `kernel_threads` gives all cores
to these kernels: idle threads of torch's pool keep spinning and would compete with them. Without the extension, or with
another activation than leaky ReLU, torch computes the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tilewise._extension import native
from tilewise.costmodel.models.torch.ragged import KernelBatch

Floats = npt.NDArray[Any]  # float32
LEAKY_SLOPE = np.float32(0.2)  # of the published baseline
_kernels: Any = native  # callers ask `available` first


@dataclass(frozen=True, eq=False)
class SageWeights:
    """The network's weights in the layout of the compiled kernels."""

    table: Floats  # (opcodes, E)
    first_kernel: Floats  # (F + E + D, 2H): for the sum over neighbours and for the node itself, side by side
    first_bias: Floats  # (H,)
    later: tuple[list[Floats], list[Floats]]  # kernels and biases of the layers after the first
    head: list[tuple[Floats, Floats]]

    @classmethod
    def from_arrays(cls, arrays: Sequence[Floats], depth: int) -> SageWeights:
        """Build from arrays in order: opcode table, kernel and bias of `depth` GraphSAGE layers, the head's."""
        first, width = arrays[1], arrays[1].shape[1]
        # The published layer stacks both halves along its inputs; side by side, one product computes both.
        first_kernel = np.ascontiguousarray(first.reshape(2, -1, width).transpose(1, 0, 2)).reshape(-1, 2 * width)
        later = arrays[3 : 1 + 2 * depth]
        head_arrays = arrays[1 + 2 * depth :]
        head = list(zip(head_arrays[::2], head_arrays[1::2], strict=True))
        return cls(arrays[0], first_kernel, arrays[2], (list(later[::2]), list(later[1::2])), head)


def available(hidden_activation: str) -> bool:
    """Tell whether the compiled kernels support a network with this activation."""
    return native is not None and hidden_activation == "leaky_relu"


def first_products(
    weights: SageWeights, features: Floats, opcode: npt.NDArray[np.int64], configs: Floats
) -> tuple[Floats, Floats]:
    """Multiply nodes and configurations (K, C, D) by the first layer's weights separately: (N, 2H) and (K, C, 2H)."""
    start, end = features.shape[1], features.shape[1] + weights.table.shape[1]
    nodes = _kernels.matmul(features, weights.first_kernel[:start])
    # There are far fewer opcodes than nodes: multiply the table once and look rows up.
    nodes += _kernels.matmul(weights.table, weights.first_kernel[start:end])[opcode]
    flat = _kernels.matmul(configs.reshape(-1, configs.shape[-1]), weights.first_kernel[end:])
    return nodes, flat.reshape(*configs.shape[:-1], -1)


def head_values(weights: SageWeights, x: Floats) -> list[Floats]:
    """Run the head on x; return the input of each of its layers and, last, its result (rows, 1)."""
    values = [x]
    for number, (kernel, bias) in enumerate(weights.head):
        y = _kernels.matmul(values[-1], kernel, bias=bias)
        if number + 1 < len(weights.head):
            np.maximum(y, LEAKY_SLOPE * y, out=y)
        values.append(y)
    return values


def supports(x: Tensor) -> bool:
    """Tell whether the compiled kernels can read this tensor: float32 on the CPU, without autocast."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")


@contextmanager
def kernel_threads(model: nn.Module, device: str) -> Iterator[None]:
    """Lend torch's threads to the compiled kernels inside the block if the model uses these; torch gets one."""
    # Other models and devices keep their threads.
    if native is None or device != "cpu" or not getattr(model, "compiled", False):
        yield
        return
    native_threads, torch_threads = native.num_threads(), torch.get_num_threads()
    native.set_num_threads(torch_threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(torch_threads)
        native.set_num_threads(native_threads)


@dataclass(eq=False)
class SagePass:
    """Activations of one batch's forward pass; `backward` may be called once."""

    batch: KernelBatch
    weights: SageWeights
    nodes: Floats
    slots: Floats
    saved: Floats | None
    hidden: list[Floats]

    @classmethod
    def forward(cls, batch: KernelBatch, tensors: Sequence[Tensor], depth: int, keep: bool) -> SagePass:
        """Run the forward pass; `tensors` are in the order of `SageWeights.from_arrays`, with `depth` GraphSAGE layers.

        `keep` saves the activations for `backward`.
        """
        weights = SageWeights.from_arrays([tensor.detach().contiguous().numpy() for tensor in tensors], depth)
        nodes, slots = first_products(weights, batch.node.numpy(), batch.opcode.numpy(), batch.config.numpy())
        result = _kernels.sage_forward(nodes, slots, weights.first_bias, *weights.later, *batch.neighbour_lists, keep)
        pooled, saved = result if keep else (result, None)
        return cls(batch, weights, nodes, slots, saved, head_values(weights, pooled.reshape(-1, pooled.shape[-1])))

    @property
    def scores(self) -> Floats:
        """Scores, (K, C)."""
        return self.hidden[-1].reshape(self.slots.shape[:2])

    def backward(self, grad: Floats) -> list[Floats]:
        """Return the gradients of the tensors, in their order, from the gradient of the scores."""
        if self.saved is None:
            raise RuntimeError("EarlyJoinSAGE's backward pass can run only once per forward pass")
        # Head, then the GraphSAGE layers, then the first products.
        grad_pooled, grad_head = _head_grad(self.weights, self.hidden, grad.reshape(-1, 1))
        kernels, biases = self.weights.later
        first_node, first_edge, neighbours = self.batch.neighbour_lists
        grad_nodes, grad_slots, grad_bias, *grad_later = _kernels.sage_backward(
            grad=grad_pooled.reshape(*self.slots.shape[:2], -1), saved=self.saved, nodes=self.nodes,
            configs=self.slots, bias=self.weights.first_bias, kernels=kernels, biases=biases,
            first_node=first_node, first_edge=first_edge, neighbours=neighbours,
        )  # fmt: skip
        # The kernels overwrite the saved activations.
        self.saved = None
        grad_table, grad_first = _first_products_grad(self.weights, self.batch, grad_nodes, grad_slots)
        grad_gnn = [array for pair in zip(*grad_later, strict=True) for array in pair]
        return [grad_table, grad_first, grad_bias, *grad_gnn, *grad_head]


def early_join_sage(batch: KernelBatch, tensors: Sequence[Tensor], depth: int) -> Tensor:
    """Compute EarlyJoinSAGE's scores (K, C) with the compiled kernels, differentiable by autograd."""
    result: Tensor = _EarlyJoinSage.apply(batch, depth, *tensors)  # type: ignore[no-untyped-call]
    return result


class _EarlyJoinSage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, batch: KernelBatch, depth: int, *tensors: Tensor) -> Tensor:
        ctx.sage_pass = SagePass.forward(batch, tensors, depth, any(ctx.needs_input_grad))
        return torch.from_numpy(ctx.sage_pass.scores)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *map(torch.from_numpy, ctx.sage_pass.backward(grads[0].contiguous().numpy()))


def _head_grad(weights: SageWeights, values: list[Floats], grad: Floats) -> tuple[Floats, list[Floats]]:
    """Backpropagate through the head; returns the gradients of its input and of its kernels and biases."""
    grads: list[Floats] = []
    for number in reversed(range(len(weights.head))):
        x = values[number]
        grads[:0] = [_kernels.matmul(x.T, grad), grad.sum(axis=0)]
        grad = _kernels.matmul(grad, weights.head[number][0].T)
        if number:
            # The input of this layer is the leaky ReLU of the previous one.
            grad *= np.where(x > 0, np.float32(1), LEAKY_SLOPE)
    return grad, grads


def _first_products_grad(
    weights: SageWeights, batch: KernelBatch, grad_nodes: Floats, grad_slots: Floats
) -> tuple[Floats, Floats]:
    """Backpropagate through `first_products`, the product of a layer's joined inputs with its dense weights.

    Returns the gradients of the opcode embedding and of the first layer's dense weights (its "kernel" in Keras).
    """
    features, embedded = batch.node.shape[1], weights.table.shape[1]
    # Sum the nodes' gradients by opcode first: the table is multiplied once per opcode.
    by_opcode = np.zeros((len(weights.table), grad_nodes.shape[1]), np.float32)
    _kernels.embedding_grad(grad_nodes, batch.opcode.numpy(), by_opcode)
    first_kernel = np.empty_like(weights.first_kernel)
    first_kernel[:features] = _kernels.matmul(batch.node.numpy().T, grad_nodes)
    first_kernel[features : features + embedded] = _kernels.matmul(weights.table.T, by_opcode)
    flat = batch.config.numpy().reshape(-1, batch.config.shape[-1])
    first_kernel[features + embedded :] = _kernels.matmul(flat.T, grad_slots.reshape(-1, grad_slots.shape[-1]))
    grad_table = _kernels.matmul(by_opcode, weights.first_kernel[features : features + embedded].T)
    # Back to the published layout, with both halves stacked along the inputs.
    width = first_kernel.shape[1] // 2
    return grad_table, np.ascontiguousarray(first_kernel.reshape(-1, 2, width).transpose(1, 0, 2)).reshape(-1, width)
