"""Data-parallel training by `torchrun`: each process scores a share of the batch's kernels, and all take the same step.

A ranking loss depends on the scores of the whole batch: if kernels have different numbers of configurations, the mean
of the shares' losses is not the loss of the batch. So the scores are gathered, every process computes the loss of the
whole batch and backpropagates through its own share. The sum of the gradients over processes equals that of a single
process, up to the order of additions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilewise.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from tilewise.costmodel.models.torch.ragged import KernelBatch

Forward = Callable[["KernelBatch"], "torch.Tensor"]


@dataclass(frozen=True)
class ProcessGroup:
    """This process within the group that trains together."""

    rank: int
    world: int

    @property
    def first(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def scores(
        self, forward: Forward, inputs: Sequence[Any], targets: Sequence[Any], batch: KernelBatch
    ) -> torch.Tensor:
        """Return the scores of a whole batch, of which this process computes its share.

        Summed over processes, the gradients are those of a single process.
        """
        from tilewise.costmodel.models.torch.ragged import collate

        # With fewer kernels than processes, all compute the same and each contributes an equal share of the gradient.
        if len(inputs) < self.world:
            every = forward(batch)
            return every / self.world + every.detach() * (1 - 1 / self.world)
        # Kernels are dealt round robin, so that every process gets about the same work.
        share = slice(self.rank, None, self.world)
        own = forward(collate(list(inputs[share]), list(targets[share]), batch.device))
        return self._gather_scores(own, len(inputs), batch.mask.shape[-1])

    def _gather_scores(self, own: torch.Tensor, kernels: int, slots: int) -> torch.Tensor:
        """Gather the scores of all processes in the batch's order; only `own`, this process's, carry gradients."""
        import torch
        import torch.distributed as group

        # Pad to the same number of kernels and slots in every process; `pad` takes the last dimension first.
        kernels_each = -(-kernels // self.world)
        slot_padding = [0, slots - own.shape[-1]]
        rows = torch.nn.functional.pad(own, [*slot_padding, *[0] * (2 * (own.dim() - 2)), 0, kernels_each - len(own)])
        gathered = [torch.zeros_like(rows) for _ in range(self.world)]
        group.all_gather(gathered, rows.detach().contiguous())
        # `all_gather` gives copies without gradients; put the own scores back.
        gathered[self.rank] = rows
        # Kernel k was scored by process k % world, at index k // world of its share.
        return torch.stack(gathered, dim=1).flatten(0, 1)[:kernels]

    def sum_gradients(self, grads: torch.Tensor) -> None:
        """Sum the gradients over all processes, bit-identically in each."""
        import torch.distributed as group

        group.all_reduce(grads)


def torchrun_group(device: str, max_seconds: float) -> ProcessGroup | None:
    """Return the process group that torchrun started; None in a plain process."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    # torchrun sets both variables.
    if world < 2 or "RANK" not in os.environ:
        return None
    if max_seconds:
        raise ConfigurationError(
            "Training with torchrun takes epochs, not max_seconds, so that all processes stop together."
        )
    import torch.distributed as group

    if not group.is_initialized():
        group.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return ProcessGroup(group.get_rank(), world)
