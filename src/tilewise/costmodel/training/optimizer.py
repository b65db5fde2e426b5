"""Adam (Kingma and Ba 2015) over one flat buffer: all parameters and gradients are views of two long vectors.

A step is then a few vector operations regardless of the number of tensors (on a CPU, one call of a compiled kernel),
and the optimizer's state is two vectors and a count, which makes checkpoints simple. Gradients are clipped by the norm
of each tensor, as the published baselines do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tilewise._extension import native
from tilewise.errors import FileFormatError

_FLUSH_INTERVAL = 64  # steps between flushes of denormal moments
_DENORMAL_LIMIT = 1e-30
_kernels: Any = native  # used only if the extension is installed


class FlatAdam:
    """Adam with optional per-tensor clipping and decoupled weight decay."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        learning_rate: float = 1e-3,
        clip_norm: float | None = None,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-7,
    ) -> None:
        """Move all parameters and gradients into flat vectors."""
        self.parameters = [p for p in parameters if p.requires_grad]
        self.learning_rate, self.clip_norm, self.weight_decay = learning_rate, clip_norm, weight_decay
        self.betas, self.epsilon, self.step_count = betas, epsilon, 0
        device = self.parameters[0].device
        sizes = torch.tensor([p.numel() for p in self.parameters])
        self.owner = torch.arange(len(sizes)).repeat_interleave(sizes).to(device)  # parameter of each value
        total = len(self.owner)
        self.values, self.grads, self.mean, self.square = (torch.zeros(total, device=device) for _ in range(4))
        # Make every parameter and gradient a view of the flat vectors.
        start = 0
        for p in self.parameters:
            view = self.values[start : start + p.numel()].view_as(p)
            view.copy_(p.data)
            p.data = view
            p.grad = self.grads[start : start + p.numel()].view_as(p)
            start += p.numel()
        # Learning rate and step count on the device, so that a captured step reads their current values.
        self.rate, self.count = (torch.zeros((), device=device) for _ in range(2))
        self._compiled = native is not None and device.type == "cpu"
        if self._compiled:
            self._vectors = [v.numpy() for v in (self.values, self.grads, self.mean, self.square)]

    def zero_grad(self) -> None:
        self.grads.zero_()

    @torch.no_grad()
    def step(self) -> None:
        """Clip the gradients and update the parameters."""
        self.prepare_device_step()
        if self.step_count % _FLUSH_INTERVAL == 0:
            self._flush_denormals()
        if self._compiled:
            self._clip()
            self._compiled_update()
        else:
            self.device_step()

    def prepare_device_step(self) -> None:
        """Update the step count and learning rate on the host, before each `device_step`."""
        self.step_count += 1
        self.rate.fill_(self.learning_rate)
        self.count.fill_(self.step_count - 1)

    @torch.no_grad()
    def device_step(self) -> None:
        """Clip and update by tensor operations alone, which a CUDA graph can capture and replay."""
        self._clip()
        self.count += 1
        # Pieces, because a GPU works on each with one block of threads; 4096 values take it two rounds.
        flat = self.values, self.grads, self.mean, self.square
        values, grads, mean, square = (torch.split(vector, 4096) for vector in flat)
        torch._fused_adamw_(
            values, grads, mean, square, [], [self.count] * len(values), lr=self.rate, beta1=self.betas[0],
            beta2=self.betas[1], weight_decay=self.weight_decay, eps=self.epsilon, amsgrad=False, maximize=False,
        )  # fmt: skip

    def _compiled_update(self) -> None:
        """Update the flat parameter vector with one call of the native Adam kernel."""
        _kernels.adam_step(
            *self._vectors, lr=self.learning_rate, beta1=self.betas[0], beta2=self.betas[1], eps=self.epsilon,
            weight_decay=self.weight_decay, decoupled=True, step=self.step_count,
        )  # fmt: skip

    def _flush_denormals(self) -> None:
        """Zero tiny moments: those of rare embedding rows would otherwise decay into denormals, which are slow."""
        for moment in (self.mean, self.square):
            moment.masked_fill_(moment.abs() < _DENORMAL_LIMIT, 0.0)

    def _clip(self) -> None:
        """Scale down each parameter's gradient to a norm of at most `clip_norm`, if there is a limit."""
        if self.clip_norm is None:
            return
        grads: list[Tensor] = [p.grad for p in self.parameters if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(grads))
        factors = (self.clip_norm / norms.clamp_min(1e-30)).clamp_max(1.0)
        if self._compiled:
            torch._foreach_mul_(grads, list(factors.unbind()))
        else:
            # On a GPU the line above is a kernel for every tensor.
            self.grads.mul_(factors[self.owner])

    def state(self) -> dict[str, Tensor]:
        return {"adam.mean": self.mean, "adam.square": self.square}

    def restore(self, state: dict[str, Tensor], step_count: int) -> None:
        """Load the state from a checkpoint."""
        for name, moment in self.state().items():
            if name not in state or state[name].shape != moment.shape:
                raise FileFormatError("The checkpoint belongs to a model of another size; start the run again.")
            moment.copy_(state[name])
        self.step_count = step_count
