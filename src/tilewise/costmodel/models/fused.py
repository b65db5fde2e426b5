"""EarlyJoinSAGE as one autograd node around the compiled kernels of `tilewise.costmodel.sage`.

Everything between the features and the scores is done on arrays, and the way back is written out: a step on small
batches would otherwise spend as long on bookkeeping as on arithmetic. `kernel_threads` gives the processor to those
kernels alone: idle threads of torch's own pool keep spinning, and would take turns with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tilewise._extension import native
from tilewise.costmodel.models.ragged import Batch
from tilewise.costmodel.sage import LEAKY_SLOPE, Floats, Weights, halves, head_values

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


def early_join_sage(
    batch: Batch, table: Tensor, gnn: Sequence[tuple[Tensor, Tensor]], head: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """(K, C) scores; layers are (kernel, bias)."""
    tensors = [table, *(tensor for layer in (*gnn, *head) for tensor in layer)]
    result: Tensor = _EarlyJoinSage.apply(batch, len(gnn), *tensors)  # type: ignore[no-untyped-call]
    return result


class _EarlyJoinSage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, batch: Batch, depth: int, *tensors: Tensor) -> Tensor:
        weights = Weights.of([tensor.detach().contiguous().numpy() for tensor in tensors], depth)
        features, configs = batch.node.numpy(), batch.config.numpy()
        nodes, slots = halves(weights, features, batch.opcode.numpy(), configs)
        keep = any(ctx.needs_input_grad)
        found = _kernels.sage_forward(nodes, slots, weights.first_bias, *weights.later, *batch.graph.tables, keep)
        pooled = found[0] if keep else found
        hidden = head_values(weights, pooled.reshape(-1, pooled.shape[-1]))
        if keep:
            ctx.kept = batch, weights, nodes, slots, found[1], hidden
        return torch.from_numpy(hidden[-1].reshape(configs.shape[:2]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if ctx.kept is None:
            raise RuntimeError("the gradient of EarlyJoinSAGE can be taken once")
        batch, weights, nodes, slots, saved, hidden = ctx.kept
        ctx.kept = None
        grad, to_head = _head_back(weights, hidden, grads[0].contiguous().numpy().reshape(-1, 1))
        to_nodes, to_slots, to_bias, *later = _kernels.sage_backward(
            grad.reshape(*slots.shape[:2], -1), saved, nodes, slots, weights.first_bias, *weights.later,
            *batch.graph.tables,
        )  # fmt: skip
        to_table, to_first = _halves_back(weights, batch, to_nodes, to_slots)
        to_gnn = [array for pair in zip(*later, strict=True) for array in pair]
        arrays = [to_table, to_first, to_bias, *to_gnn, *to_head]
        return None, None, *(torch.from_numpy(array) for array in arrays)


def _head_back(weights: Weights, values: list[Floats], grad: Floats) -> tuple[Floats, list[Floats]]:
    found: list[Floats] = []
    for number in reversed(range(len(weights.head))):
        x = values[number]
        found[:0] = [_kernels.matmul(x.T, grad), grad.sum(axis=0)]
        grad = _kernels.matmul(grad, weights.head[number][0].T)
        if number:
            grad *= np.where(x > 0, np.float32(1), LEAKY_SLOPE)
    return grad, found


def _halves_back(weights: Weights, batch: Batch, to_nodes: Floats, to_slots: Floats) -> tuple[Floats, Floats]:
    """Back through `halves`: the gradients of the opcode table and of the first kernel."""
    features, embedded = batch.node.shape[1], weights.table.shape[1]
    by_opcode = np.zeros((len(weights.table), to_nodes.shape[1]), np.float32)
    _kernels.embedding_grad(to_nodes, batch.opcode.numpy(), by_opcode)
    wide = np.empty_like(weights.wide)
    wide[:features] = _kernels.matmul(batch.node.numpy().T, to_nodes)
    wide[features : features + embedded] = _kernels.matmul(weights.table.T, by_opcode)
    flat = batch.config.numpy().reshape(-1, batch.config.shape[-1])
    wide[features + embedded :] = _kernels.matmul(flat.T, to_slots.reshape(-1, to_slots.shape[-1]))
    to_table = _kernels.matmul(by_opcode, weights.wide[features : features + embedded].T)
    width = wide.shape[1] // 2
    return to_table, np.ascontiguousarray(wide.reshape(-1, 2, width).transpose(1, 0, 2)).reshape(-1, width)
