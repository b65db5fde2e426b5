"""EarlyJoinSAGE as one autograd node around the compiled kernels of `tilewise.costmodel.models.numpy.sage`.

Everything between the features and the scores is done on arrays, and the way back is written out: a step on small
batches would otherwise spend as long on bookkeeping as on arithmetic. Training takes the same way without autograd.
`kernel_threads` gives the processor to those kernels alone: idle threads of torch's own pool keep spinning, and would
take turns with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tilewise._extension import native
from tilewise.costmodel.models.numpy.sage import LEAKY_SLOPE, Floats, SageWeights, first_products, head_values
from tilewise.costmodel.models.torch.ragged import Batch
from tilewise.costmodel.train.losses import CombinedLoss

_kernels: Any = native  # `sage.available` says whether they are there


def plain(x: Tensor) -> bool:
    """Whether these are numbers that the kernels take."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")


@contextmanager
def kernel_threads(model: nn.Module, device: str) -> Iterator[None]:
    """Where the model uses the compiled kernels, as many threads as torch has go to them, and one to torch."""
    if native is None or device != "cpu" or not getattr(model, "compiled", False):
        yield
        return
    ours, torchs = native.num_threads(), torch.get_num_threads()
    native.set_num_threads(torchs)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(torchs)
        native.set_num_threads(ours)


@dataclass(eq=False)
class Pass:
    """One batch on its way through the network; `back` may be called once."""

    batch: Batch
    weights: SageWeights
    nodes: Floats
    slots: Floats
    saved: Floats | None
    hidden: list[Floats]

    @classmethod
    def forward(cls, batch: Batch, tensors: Sequence[Tensor], depth: int, keep: bool) -> Pass:
        """`tensors` as in `sage.Weights.of`."""
        weights = SageWeights.from_arrays([tensor.detach().contiguous().numpy() for tensor in tensors], depth)
        nodes, slots = first_products(weights, batch.node.numpy(), batch.opcode.numpy(), batch.config.numpy())
        found = _kernels.sage_forward(nodes, slots, weights.first_bias, *weights.later, *batch.graph.tables, keep)
        pooled, saved = found if keep else (found, None)
        return cls(batch, weights, nodes, slots, saved, head_values(weights, pooled.reshape(-1, pooled.shape[-1])))

    @property
    def scores(self) -> Floats:
        """(K, C)."""
        return self.hidden[-1].reshape(self.slots.shape[:2])

    def back(self, grad: Floats) -> list[Floats]:
        """The gradients of the tensors, in their order, from that of the scores."""
        if self.saved is None:
            raise RuntimeError("the gradient of EarlyJoinSAGE can be taken once")
        to_pooled, to_head = _head_back(self.weights, self.hidden, grad.reshape(-1, 1))
        to_nodes, to_slots, to_bias, *later = _kernels.sage_backward(
            to_pooled.reshape(*self.slots.shape[:2], -1), self.saved, self.nodes, self.slots, self.weights.first_bias,
            *self.weights.later, *self.batch.graph.tables,
        )  # fmt: skip
        self.saved = None
        to_table, to_first = _first_products_grad(self.weights, self.batch, to_nodes, to_slots)
        to_gnn = [array for pair in zip(*later, strict=True) for array in pair]
        return [to_table, to_first, to_bias, *to_gnn, *to_head]


def early_join_sage(batch: Batch, tensors: Sequence[Tensor], depth: int) -> Tensor:
    """(K, C) scores for autograd."""
    result: Tensor = _EarlyJoinSage.apply(batch, depth, *tensors)  # type: ignore[no-untyped-call]
    return result


def learn_early_join_sage(
    batch: Batch, tensors: Sequence[Tensor], depth: int, loss: CombinedLoss
) -> tuple[float, Tensor]:
    """Adds the loss's gradient to the tensors' without autograd; gives the loss and the scores."""
    passed = Pass.forward(batch, tensors, depth, True)
    value, slope = loss.with_gradient(
        passed.scores.astype(np.float64), batch.target.numpy().astype(np.float64), batch.mask.numpy()
    )
    for tensor, grad in zip(tensors, passed.back(slope.astype(np.float32)), strict=True):
        if tensor.grad is None:
            tensor.grad = torch.from_numpy(grad)
        else:
            own = tensor.grad.numpy()
            np.add(own, grad, out=own)
    return value, torch.from_numpy(passed.scores)


class _EarlyJoinSage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, batch: Batch, depth: int, *tensors: Tensor) -> Tensor:
        ctx.passed = Pass.forward(batch, tensors, depth, any(ctx.needs_input_grad))
        return torch.from_numpy(ctx.passed.scores)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *map(torch.from_numpy, ctx.passed.back(grads[0].contiguous().numpy()))


def _head_back(weights: SageWeights, values: list[Floats], grad: Floats) -> tuple[Floats, list[Floats]]:
    found: list[Floats] = []
    for number in reversed(range(len(weights.head))):
        x = values[number]
        found[:0] = [_kernels.matmul(x.T, grad), grad.sum(axis=0)]
        grad = _kernels.matmul(grad, weights.head[number][0].T)
        if number:
            grad *= np.where(x > 0, np.float32(1), LEAKY_SLOPE)
    return grad, found


def _first_products_grad(
    weights: SageWeights, batch: Batch, to_nodes: Floats, to_slots: Floats
) -> tuple[Floats, Floats]:
    """Back through `first_products`: the gradients of the opcode table and of the first kernel."""
    features, embedded = batch.node.shape[1], weights.table.shape[1]
    by_opcode = np.zeros((len(weights.table), to_nodes.shape[1]), np.float32)
    _kernels.embedding_grad(to_nodes, batch.opcode.numpy(), by_opcode)
    wide = np.empty_like(weights.first_kernel)
    wide[:features] = _kernels.matmul(batch.node.numpy().T, to_nodes)
    wide[features : features + embedded] = _kernels.matmul(weights.table.T, by_opcode)
    flat = batch.config.numpy().reshape(-1, batch.config.shape[-1])
    wide[features + embedded :] = _kernels.matmul(flat.T, to_slots.reshape(-1, to_slots.shape[-1]))
    to_table = _kernels.matmul(by_opcode, weights.first_kernel[features : features + embedded].T)
    width = wide.shape[1] // 2
    return to_table, np.ascontiguousarray(wide.reshape(-1, 2, width).transpose(1, 0, 2)).reshape(-1, width)
