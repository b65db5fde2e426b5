"""TileRanker's configurations as one autograd node around compiled kernels.

What depends on the kernel alone is small and stays with autograd, which hands its results in here; what every
configuration goes through is done slate by slate, each while it is in the cache, and the way back is written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewise._extension import native
from tilewise.costmodel.models.fused import plain
from tilewise.costmodel.models.ragged import Batch

_kernels: Any = native  # `usable` says whether they are there


@dataclass(frozen=True, eq=False)
class Tower:
    """The weights of K kernels' slates, what is a kernel's own being folded into them."""

    wide: Tensor  # (D, members * H)
    first: Tensor  # (K, H)
    keys: Tensor  # (N, H)
    offsets: Tensor  # (N,)
    values: Tensor  # (N, H)
    weights: Sequence[Tensor]  # (K, H, H) each
    biases: Sequence[Tensor]  # (K, H) each
    last: Tensor  # (members * H, members)


def usable(batch: Batch) -> bool:
    return native is not None and plain(batch.config)


def slate_scores(batch: Batch, skipped: int, tower: Tower) -> Tensor:
    """(K, C, members), from the columns of the configurations after the first `skipped`."""
    own = (tower.wide, tower.first, tower.keys, tower.offsets, tower.values, tower.last)
    result: Tensor = _Slates.apply(batch, skipped, *own, *tower.weights, *tower.biases)  # type: ignore[no-untyped-call]
    return result


class _Slates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, batch: Batch, skipped: int, *tensors: Tensor) -> Tensor:
        arrays = [tensor.detach().contiguous().numpy() for tensor in tensors]
        wide, first, keys, offsets, values, last, *blocks = arrays
        half = len(blocks) // 2
        starts = np.concatenate([[0], np.cumsum(batch.node_counts)])
        ctx.arguments = (
            batch.config.contiguous().numpy(), skipped, wide, first, starts, keys, offsets, values,
            blocks[:half], blocks[half:], last,
        )  # fmt: skip
        scores, ctx.kept = _kernels.slates_forward(*ctx.arguments)
        return torch.from_numpy(scores)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        hidden, first, keys, offsets, values, weights, biases, last = _kernels.slates_backward(
            grads[0].contiguous().numpy(), ctx.kept, *ctx.arguments
        )
        config, skipped = ctx.arguments[:2]
        own = config.reshape(-1, config.shape[-1])[:, skipped:]
        wide = _kernels.matmul(own.T, hidden.reshape(len(own), -1))
        found = [wide, first, keys, offsets, values, last.sum(axis=0), *weights, *biases]
        return None, None, *map(torch.from_numpy, found)
