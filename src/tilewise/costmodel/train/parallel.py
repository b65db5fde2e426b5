"""Data-parallel training by `torchrun`: each process scores its share of a step's kernels, and all take the same step.

A ranking loss looks at the scores of a whole batch, and its mean over parts is not the mean over the whole where
kernels have different numbers of configurations. So the scores are gathered, every process works out the loss of the
whole batch and sends back the gradient of its own share; the sum over processes is what one process would have found,
up to the order of additions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilewise.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from tilewise.costmodel.models.torch.ragged import Batch

Forward = Callable[["Batch"], "torch.Tensor"]
LossOf = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor"], "torch.Tensor"]


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together."""

    rank: int
    world: int

    @property
    def first(self) -> bool:
        """Whether this is the one that writes files and speaks."""
        return self.rank == 0

    def backward(
        self, forward: Forward, loss_of: LossOf, parts: Sequence[Any], targets: Sequence[Any], batch: Batch, device: str
    ) -> tuple[float, torch.Tensor]:
        """Add this process's share of the whole batch's gradient; gives the loss and all scores."""
        import torch

        from tilewise.costmodel.models.torch.ragged import collate

        if len(parts) < self.world:  # not one kernel each: all do the same, and each brings its share of the sum
            scores = forward(batch)
            loss = loss_of(scores, batch.target, batch.mask)
            torch.autograd.backward(loss / self.world)
            return float(loss.detach()), scores.detach()
        mine = slice(self.rank, None, self.world)
        own = forward(collate(list(parts[mine]), list(targets[mine]), device))
        scores = self._whole(own, len(parts), batch.mask.shape[-1])
        loss = loss_of(scores, batch.target, batch.mask)
        torch.autograd.backward(loss)
        return float(loss.detach()), scores.detach()

    def _whole(self, own: torch.Tensor, kernels: int, slots: int) -> torch.Tensor:
        """All scores in the batch's order; only one's own carry a gradient."""
        import torch
        import torch.distributed as group

        most = -(-kernels // self.world)
        short = [0, slots - own.shape[-1]]  # the last dimension first, as `pad` wants it
        rows = torch.nn.functional.pad(own, [*short, *[0] * (2 * (own.dim() - 2)), 0, most - len(own)])
        every = [torch.zeros_like(rows) for _ in range(self.world)]
        group.all_gather(every, rows.detach().contiguous())
        every[self.rank] = rows
        # Kernel k was scored by process k % world, as the k // world-th of its own.
        return torch.stack(every, dim=1).flatten(0, 1)[:kernels]

    def add_up(self, grads: torch.Tensor) -> None:
        """The sum of everybody's gradients, the same bits in every process."""
        import torch.distributed as group

        group.all_reduce(grads)


def ranks_here(device: str, max_seconds: float) -> Ranks | None:
    """The processes that torchrun started beside this one; None where it did not."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world < 2 or "RANK" not in os.environ:
        return None
    if max_seconds:
        raise ConfigurationError("Processes that train together stop together: give epochs, and no limit of seconds.")
    import torch.distributed as group

    if not group.is_initialized():
        group.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return Ranks(group.get_rank(), world)
