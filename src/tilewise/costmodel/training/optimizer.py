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
        total = sum(p.numel() for p in self.parameters)
        device = self.parameters[0].device
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
        if self.clip_norm is not None:
            self._clip(self.clip_norm)
        self.step_count += 1
        if self.step_count % _FLUSH_INTERVAL == 0:
            self._flush_denormals()
        if self._compiled:
            self._compiled_update()
        else:
            self.rate.fill_(self.learning_rate)
            self.count.fill_(self.step_count)
            self._update()

    def prepare_device_step(self) -> None:
        """Update the step count and learning rate on the host, before each `device_step`."""
        self.step_count += 1
        self.rate.fill_(self.learning_rate)
        self.count.fill_(self.step_count - 1)

    @torch.no_grad()
    def device_step(self) -> None:
        """Clip and update by tensor operations alone, which a CUDA graph can capture and replay."""
        if self.clip_norm is not None:
            self._clip(self.clip_norm)
        self.count += 1
        self._update()

    def _compiled_update(self) -> None:
        """Update the flat parameter vector with one call of the native Adam kernel."""
        _kernels.adam_step(
            *self._vectors, lr=self.learning_rate, beta1=self.betas[0], beta2=self.betas[1], eps=self.epsilon,
            weight_decay=self.weight_decay, decoupled=True, step=self.step_count,
        )  # fmt: skip

    def _update(self) -> None:
        """Update the parameters by torch operations: on GPUs and without the extension."""
        first, second = self.betas
        self.mean.lerp_(self.grads, 1 - first)
        self.square.mul_(second).addcmul_(self.grads, self.grads, value=1 - second)
        # Bias correction of both moments.
        correction = (1 - second**self.count).sqrt()
        denominator = self.square.sqrt().div_(correction).add_(self.epsilon)
        # Decoupled weight decay (AdamW, Loshchilov and Hutter 2019).
        if self.weight_decay:
            self.values.mul_(1 - self.rate * self.weight_decay)
        self.values.sub_(self.mean / denominator * (self.rate / (1 - first**self.count)))

    def _flush_denormals(self) -> None:
        """Zero tiny moments: those of rare embedding rows would otherwise decay into denormals, which are slow."""
        for moment in (self.mean, self.square):
            moment.masked_fill_(moment.abs() < _DENORMAL_LIMIT, 0.0)

    def _clip(self, limit: float) -> None:
        """Scale down each parameter's gradient to a norm of at most `limit`."""
        grads: list[Tensor] = [p.grad for p in self.parameters if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(grads))
        factors = (limit / norms.clamp_min(1e-30)).clamp_max(1.0)
        torch._foreach_mul_(grads, list(factors.unbind()))

    def state(self) -> dict[str, Tensor]:
        return {"adam.mean": self.mean, "adam.square": self.square}

    def restore(self, state: dict[str, Tensor], step_count: int) -> None:
        """Load the state from a checkpoint."""
        for name, moment in self.state().items():
            if name not in state or state[name].shape != moment.shape:
                raise FileFormatError("The checkpoint belongs to a model of another size; start the run again.")
            moment.copy_(state[name])
        self.step_count = step_count
