"""What training minimises: a weighted sum of losses written as ``ListMLELoss:1,MSE:0.02``.

Scores and targets come as (kernels, slots) with a mask. A higher target is a slower configuration, and the ranking
losses take it as relevance, so the slowest ranks first and a low score means fast. Ranking losses divide scores by a
temperature of ten; the weights are normalised to sum to one.

A loss is a function on float64 arrays that gives its value and its gradient by the scores, none of it from padding.
Slates are small, so the sum of all parts is one node for autograd rather than dozens of calls into torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tilewise.errors import ConfigurationError

TEMPERATURE = 10.0
SHARPNESS = 10.0  # a tenth in log runtime is one unit of log-odds in `fastest_first`
_FAR = 500.0  # exponents whose sums float64 still holds
Doubles = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Loss = Callable[[Doubles, Doubles, Mask], tuple[float, Doubles]]


def list_mle(scores: Doubles, target: Doubles, mask: Mask) -> tuple[float, Doubles]:
    """Negative log-likelihood of the true order, slowest first; summed over a slate, averaged over kernels."""
    value, grad = _ordered_likelihood(scores, -target, mask, 1 / TEMPERATURE, np.ones(scores.shape[1]))
    return value / len(scores), grad / len(scores)


def fastest_first(scores: Doubles, target: Doubles, mask: Mask) -> tuple[float, Doubles]:
    """ListMLE in the order that matters to a tuner: the likelihood of naming the fastest first, and so on down.

    A position counts by how close it is to the top, so that the order among the slow costs little.
    """
    weight = 1.0 / (1.0 + np.arange(scores.shape[1]) / 4.0)
    value, grad = _ordered_likelihood(scores, target, mask, -SHARPNESS, weight)
    total = float(np.concatenate([[0.0], weight.cumsum()])[mask.sum(axis=1)].sum())
    return value / total, grad / total


def _ordered_likelihood(
    scores: Doubles, key: Doubles, mask: Mask, factor: float, weight: Doubles
) -> tuple[float, Doubles]:
    """Sum over positions i by rising key of weight_i (log sum_{j >= i} exp(s_j) - s_i), s being factor * scores."""
    whole = bool(mask.all())
    order = (key if whole else np.where(mask, key, np.inf)).argsort(axis=1, kind="stable")  # padding comes last
    order += np.arange(0, scores.size, scores.shape[1])[:, None]  # into the flat arrays
    s, w = factor * scores.ravel()[order], np.broadcast_to(weight, scores.shape)
    if not whole:
        there = mask.ravel()[order]
        s, w = np.where(there, s, -np.inf), np.where(there, w, 0.0)
    terms, slope = _running_sums(s, w)
    grad = np.empty(scores.size)
    grad[order.ravel()] = factor * slope.ravel()
    return terms, grad.reshape(scores.shape)


def _running_sums(s: Doubles, w: Doubles) -> tuple[float, Doubles]:
    """The sum of w_i (log sum_{j >= i} exp(s_j) - s_i) and its slope by s; s is -inf and w 0 where nothing counts.

    The slope is one more running sum, from the other side.
    """
    top = s.max(axis=1, keepdims=True)
    exponent = s - top
    with np.errstate(divide="ignore", invalid="ignore"):
        counts = w > 0
        if not np.where(counts, exponent, 0.0).min() > -_FAR:  # what is so far from the largest would be lost
            tail = np.logaddexp.accumulate(exponent[:, ::-1], axis=1)[:, ::-1]
            starts = np.where(counts, np.log(w) - tail, -np.inf)
            slope = np.exp(exponent + np.logaddexp.accumulate(starts, axis=1)) - w
        else:
            e = np.exp(exponent)
            sums = e[:, ::-1].cumsum(axis=1)[:, ::-1]
            slope = e * np.where(counts, w / sums, 0.0).cumsum(axis=1) - w
            tail = np.log(sums)
        return float(np.where(counts, (tail - exponent) * w, 0.0).sum()), slope


def pairwise_hinge(scores: Doubles, target: Doubles, mask: Mask) -> tuple[float, Doubles]:
    """Hinge on every pair with different targets, summed, over the number of slots (as tf-ranking reduces it)."""
    s, count = scores / TEMPERATURE, mask.sum()
    slower = (target[:, :, None] > target[:, None, :]) & mask[:, :, None] & mask[:, None, :]
    hinge = (1.0 - (s[:, :, None] - s[:, None, :])) * slower
    short = hinge > 0
    slope = short.sum(axis=1) - short.sum(axis=2)
    return float(hinge[short].sum() / count), slope / (TEMPERATURE * count)


def mean_squared_error(scores: Doubles, target: Doubles, mask: Mask) -> tuple[float, Doubles]:
    gap, count = (scores - target) * mask, mask.sum()
    return float((gap * gap).sum() / count), gap * (2.0 / count)


def mean_absolute_error(scores: Doubles, target: Doubles, mask: Mask) -> tuple[float, Doubles]:
    gap, count = (scores - target) * mask, mask.sum()
    return float(np.abs(gap).sum() / count), np.sign(gap) / count


def log_mse(scores: Doubles, target: Doubles, mask: Mask) -> tuple[float, Doubles]:
    """Squared error of log runtime, each kernel's own level taken out of both sides."""
    count = np.maximum(mask.sum(axis=1, keepdims=True), 1)
    gap = (scores - np.log(np.maximum(target, 1e-9))) * mask
    gap = (gap - gap.sum(axis=1, keepdims=True) / count) * mask
    total = mask.sum()
    # The level taken out adds nothing to the slope: the gaps of a kernel sum to zero.
    return float((gap * gap).sum() / total), gap * (2.0 / total)


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
        apply: Any = _Combined.apply
        total: Tensor = apply(scores, target, mask, self)
        return total

    def with_gradient(self, scores: Doubles, target: Doubles, mask: Mask) -> tuple[float, Doubles]:
        total, slope = 0.0, np.zeros_like(scores)
        for loss, weight in self.parts:
            value, grad = loss(scores, target, mask)
            total, slope = total + weight * value, slope + weight * grad
        return total, slope


class _Combined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor, mask: Tensor, loss: CombinedLoss) -> Tensor:
        s, t = (part.detach().cpu().double().numpy() for part in (scores, target))
        value, grad = loss.with_gradient(s, t, mask.cpu().numpy())
        ctx.grad = torch.from_numpy(grad).to(scores)
        return torch.tensor(value, dtype=torch.promote_types(scores.dtype, torch.float32), device=scores.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.grad * grads[0].to(ctx.grad), None, None, None


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
