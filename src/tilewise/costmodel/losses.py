"""What training minimises: a weighted sum of losses written as ``ListMLELoss:1,MSE:0.02``.

Scores and targets come as (kernels, slots) with a mask. A higher target is a slower configuration, and the ranking
losses take it as relevance, so the slowest ranks first and a low score means fast. Ranking losses divide scores by a
temperature of ten; the weights are normalised to sum to one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import ConfigurationError

TEMPERATURE = 10.0
SHARPNESS = 10.0  # a tenth in log runtime is one unit of log-odds in `fastest_first`
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def list_mle(scores: Tensor, target: Tensor, mask: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    """Negative log-likelihood of the true order, slowest first; summed over a slate, averaged over kernels."""
    order = target.masked_fill(~mask, -torch.inf).argsort(dim=1, descending=True, stable=True)
    s = (scores / temperature).gather(1, order)
    total: Tensor = _ListMLE.apply(s, mask.gather(1, order), torch.ones_like(s))  # type: ignore[no-untyped-call]
    return total / len(scores)


class _ListMLE(torch.autograd.Function):
    """Sum over kept positions i of weight_i (log sum_{j >= i} exp(s_j) - s_i); the gradient is one more running sum."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, kept: Tensor, weight: Tensor) -> Tensor:
        tail = s.masked_fill(~kept, -torch.inf).flip(1).logcumsumexp(1).flip(1)
        ctx.save_for_backward(s, kept, weight, tail)
        return ((tail - s) * weight).masked_fill_(~kept, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        s, kept, weight, tail = ctx.saved_tensors
        reached = (weight.log() - tail).masked_fill_(~kept, -torch.inf).logcumsumexp(1)
        return ((s + reached).exp_() - weight).masked_fill_(~kept, 0.0) * grads[0], None, None


def pairwise_hinge(scores: Tensor, target: Tensor, mask: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    """Hinge on every pair with different targets, summed, over the number of slots (as tf-ranking reduces it)."""
    s = scores / temperature
    slower = (target[:, :, None] > target[:, None, :]) & mask[:, :, None] & mask[:, None, :]
    hinge = (1.0 - (s[:, :, None] - s[:, None, :])).clamp_min(0.0)
    return (hinge * slower).sum() / mask.sum()


def mean_squared_error(scores: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    return ((scores - target).square() * mask).sum() / mask.sum()


def mean_absolute_error(scores: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    return ((scores - target).abs() * mask).sum() / mask.sum()


def fastest_first(scores: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """ListMLE in the order that matters to a tuner: the likelihood of naming the fastest first, and so on down.

    A position counts by how close it is to the top, so that the order among the slow costs little.
    """
    order = target.masked_fill(~mask, torch.inf).argsort(dim=1, stable=True)
    kept = mask.gather(1, order)
    weight = (
        (1.0 / (1.0 + torch.arange(scores.shape[1], device=scores.device) / 4.0)).to(scores.dtype).expand_as(scores)
    )
    ordered = -SHARPNESS * scores.gather(1, order)
    total: Tensor = _ListMLE.apply(ordered, kept, weight)  # type: ignore[no-untyped-call]
    return total / (weight * kept).sum()


def log_mse(scores: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Squared error of log runtime, each kernel's own level taken out of both sides."""
    count = mask.sum(1, keepdim=True).clamp_min(1)
    goal = target.clamp_min(1e-9).log()
    gap = (scores - goal) * mask
    gap = (gap - gap.sum(1, keepdim=True) / count) * mask
    return gap.square().sum() / mask.sum()


LOSSES: dict[str, Loss] = {
    "ListMLELoss": list_mle,
    "PairwiseHingeLoss": pairwise_hinge,
    "MSE": mean_squared_error,
    "MeanSquaredError": mean_squared_error,
    "MAE": mean_absolute_error,
    "FastestFirst": fastest_first,
    "LogMSE": log_mse,
}


@dataclass(frozen=True)
class CombinedLoss:
    """The weighted sum named by a string."""

    parts: tuple[tuple[Loss, float], ...]

    def __call__(self, scores: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        total = torch.zeros((), device=scores.device)
        for loss, weight in self.parts:
            total = total + weight * loss(scores.float(), target, mask)
        return total


def parse_losses(text: str) -> CombinedLoss:
    """``ListMLELoss:1,MSE:0.02`` to a loss; a name without a number counts as 1."""
    parts = []
    for piece in text.split(","):
        name, _, number = piece.strip().partition(":")
        if name not in LOSSES:
            raise ConfigurationError(
                f"There is no loss {name!r}; use {', '.join(LOSSES)}, as in ListMLELoss:1,MSE:0.02."
            )
        parts.append((LOSSES[name], _weight(number or "1", piece)))
    total = sum(weight for _, weight in parts)
    if total <= 0:
        raise ConfigurationError(f"The weights of the losses {text!r} must sum to more than zero.")
    return CombinedLoss(tuple((loss, weight / total) for loss, weight in parts))


def _weight(text: str, piece: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = float("nan")
    if not 0 <= weight < float("inf"):
        raise ConfigurationError(f"The loss {piece!r} needs a weight of zero or more, as in MSE:0.02.")
    return weight
