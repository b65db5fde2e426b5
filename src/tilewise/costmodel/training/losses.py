"""Training losses: a weighted sum written as ``ListMLELoss:1,MSE:0.02``.

Scores and targets are (kernels, slots) with a mask. A higher target is a slower configuration, and the ranking losses
use it as relevance, so the slowest ranks first and a low score means fast. Ranking losses divide scores by a
temperature of ten; the weights are normalised to sum to one.

A loss is a function on float64 arrays that returns its value and its gradient by the scores; padding contributes
nothing. The arrays are small, so the weighted sum is one autograd node instead of dozens of torch operations.
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

TEMPERATURE = 10.0  # of the published baselines
SHARPNESS = 10.0  # in `fastest_first`, 0.1 in log runtime is one unit of log-odds
_POSITION_SCALE = 4.0  # position at which the weight in `fastest_first` has halved
_MAX_EXPONENT = 500.0  # sums of exp(-500) and larger are exact enough in float64
Doubles = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Loss = Callable[[Doubles, Doubles, Mask], tuple[float, Doubles]]


def list_mle(scores: Doubles, target: Doubles, mask: Mask) -> tuple[float, Doubles]:
    """Compute ListMLE (Xia et al. 2008), the mean negative log-likelihood of the order, and its gradient (K, C)."""
    value, grad = _ordered_likelihood(scores, -target, mask, 1 / TEMPERATURE, np.ones(scores.shape[1]))
    return value / len(scores), grad / len(scores)


def fastest_first(scores: Doubles, target: Doubles, mask: Mask) -> tuple[float, Doubles]:
    """Compute ListMLE over orders from fastest to slowest and its gradient by the scores; arrays are (K, C).

    Positions near the top have larger weights, so that the order among slow configurations costs little.
    """
    weight = 1.0 / (1.0 + np.arange(scores.shape[1]) / _POSITION_SCALE)
    value, grad = _ordered_likelihood(scores, target, mask, -SHARPNESS, weight)
    total = float(np.concatenate([[0.0], weight.cumsum()])[mask.sum(axis=1)].sum())
    return value / total, grad / total


def _ordered_likelihood(
    scores: Doubles, key: Doubles, mask: Mask, factor: float, weight: Doubles
) -> tuple[float, Doubles]:
    """Sum weight_i (log sum_{j >= i} exp(s_j) - s_i) over positions i in order of `key`, with s = factor · scores.

    Returns the sum and its gradient by the scores; all arrays are (K, C).
    """
    unpadded = bool(mask.all())
    order = (key if unpadded else np.where(mask, key, np.inf)).argsort(axis=1, kind="stable")  # padding comes last
    # Turn the order within rows into indices of the flat arrays.
    order += np.arange(0, scores.size, scores.shape[1])[:, None]  # into the flat arrays
    s, w = factor * scores.ravel()[order], np.broadcast_to(weight, scores.shape)
    if not unpadded:
        present = mask.ravel()[order]
        s, w = np.where(present, s, -np.inf), np.where(present, w, 0.0)
    value, ordered_grad = _suffix_log_sums(s, w)
    # Scatter the gradient back to the original order.
    grad = np.empty(scores.size)
    grad[order.ravel()] = factor * ordered_grad.ravel()
    return value, grad.reshape(scores.shape)


def _suffix_log_sums(s: Doubles, w: Doubles) -> tuple[float, Doubles]:
    """Return sum_i w_i (log sum_{j >= i} exp(s_j) - s_i) and its gradient by s; padding has s = -inf and w = 0.

    The gradient is exp(s_i) sum_{j <= i} w_j / (sum_{l >= j} exp(s_l)) - w_i, a prefix sum.
    """
    # Shift by the row's maximum, as in a stable softmax.
    top = s.max(axis=1, keepdims=True)
    exponent = s - top
    with np.errstate(divide="ignore", invalid="ignore"):
        counts = w > 0
        # Far below the largest score exp underflows; then everything is computed in logarithms.
        if not np.where(counts, exponent, 0.0).min() > -_MAX_EXPONENT:
            log_sums = np.logaddexp.accumulate(exponent[:, ::-1], axis=1)[:, ::-1]
            starts = np.where(counts, np.log(w) - log_sums, -np.inf)
            grad = np.exp(exponent + np.logaddexp.accumulate(starts, axis=1)) - w
        else:
            e = np.exp(exponent)
            # Suffix sums are prefix sums of the reversed row.
            sums = e[:, ::-1].cumsum(axis=1)[:, ::-1]
            grad = e * np.where(counts, w / sums, 0.0).cumsum(axis=1) - w
            log_sums = np.log(sums)
        return float(np.where(counts, (log_sums - exponent) * w, 0.0).sum()), grad


def pairwise_hinge(scores: Doubles, target: Doubles, mask: Mask) -> tuple[float, Doubles]:
    """Return the hinge loss of pairs with different targets, per slot as in TF-Ranking, and its gradient."""
    s, count = scores / TEMPERATURE, mask.sum()
    slower = (target[:, :, None] > target[:, None, :]) & mask[:, :, None] & mask[:, None, :]
    hinge = (1.0 - (s[:, :, None] - s[:, None, :])) * slower
    active = hinge > 0
    grad = active.sum(axis=1) - active.sum(axis=2)
    return float(hinge[active].sum() / count), grad / (TEMPERATURE * count)


def mean_squared_error(scores: Doubles, target: Doubles, mask: Mask) -> tuple[float, Doubles]:
    gap, count = (scores - target) * mask, mask.sum()
    return float((gap * gap).sum() / count), gap * (2.0 / count)


def mean_absolute_error(scores: Doubles, target: Doubles, mask: Mask) -> tuple[float, Doubles]:
    gap, count = (scores - target) * mask, mask.sum()
    return float(np.abs(gap).sum() / count), np.sign(gap) / count


def log_mse(scores: Doubles, target: Doubles, mask: Mask) -> tuple[float, Doubles]:
    """Return the mean squared error of log runtime, up to a constant per kernel, and its gradient."""
    count = np.maximum(mask.sum(axis=1, keepdims=True), 1)
    gap = (scores - np.log(np.maximum(target, 1e-9))) * mask
    gap = (gap - gap.sum(axis=1, keepdims=True) / count) * mask
    total = mask.sum()
    # The subtracted mean does not change the gradient: the errors of a kernel sum to zero.
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


def fastest_first_tensor(scores: Tensor, target: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `fastest_first` and its gradient by tensor operations; `target` must ascend, with padding last.

    Scores are (K, members, C), target and mask (K, 1, C). Exponents below `_MAX_EXPONENT` are clipped.
    """
    weight = mask / (1.0 + torch.arange(scores.shape[2], device=scores.device) / _POSITION_SCALE)
    weight = weight / (weight.sum() * scores.shape[1])
    s = (-SHARPNESS * scores.double()).masked_fill(~mask, -torch.inf)
    exponent = (s - s.amax(2, keepdim=True)).clamp_min(-_MAX_EXPONENT)
    e = exponent.exp()
    sums = e.flip(2).cumsum(2).flip(2)
    grad = -SHARPNESS * (e * (weight / sums).cumsum(2) - weight)
    return ((sums.log() - exponent) * weight).sum(), grad


def log_mse_tensor(scores: Tensor, target: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `log_mse` and its gradient by tensor operations; shapes as in `fastest_first_tensor`."""
    count = mask.sum(2, keepdim=True)
    gap = (scores - target.clamp_min(1e-9).log()) * mask
    gap = (gap - gap.sum(2, keepdim=True) / count.clamp_min(1)) * mask
    share = 1 / (count.sum() * scores.shape[1])
    return (gap * gap).sum() * share, 2.0 * gap * share


TENSOR_LOSSES: dict[Any, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    fastest_first: fastest_first_tensor,
    log_mse: log_mse_tensor,
}


@dataclass(frozen=True)
class CombinedLoss:
    """Weighted sum of losses."""

    terms: tuple[tuple[Loss, float], ...]

    def __call__(self, scores: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        apply: Any = _CombinedFunction.apply
        total: Tensor = apply(scores, target, mask, self)
        return total

    @property
    def has_tensor_form(self) -> bool:
        """Whether every term can be computed on the device."""
        return all(loss in TENSOR_LOSSES for loss, _ in self.terms)

    def on_device(self, scores: Tensor, target: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of scores (K, members, C) and its gradient by tensor operations, if it `has_tensor_form`.

        Target and mask are (K, C); every row ascends, with its padding last.
        """
        total, total_grad = torch.zeros((), device=scores.device), torch.zeros_like(scores)
        for loss, weight in self.terms:
            value, grad = TENSOR_LOSSES[loss](scores.detach(), target[:, None], mask[:, None])
            total, total_grad = total + weight * value, total_grad + weight * grad
        return total, (total_grad * mask[:, None]).to(scores.dtype)

    def with_gradient(self, scores: Doubles, target: Doubles, mask: Mask) -> tuple[float, Doubles]:
        """Return the weighted sum of the losses and its gradient with respect to scores (K, C)."""
        total, total_grad = 0.0, np.zeros_like(scores)
        for loss, weight in self.terms:
            value, grad = loss(scores, target, mask)
            total, total_grad = total + weight * value, total_grad + weight * grad
        return total, total_grad


class _CombinedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor, mask: Tensor, loss: CombinedLoss) -> Tensor:
        """Compute the loss of scores against targets as a scalar tensor, and keep the gradient for `backward`."""
        s, t = (x.detach().cpu().double().numpy() for x in (scores, target))
        # The gradient is computed together with the value and reused in `backward`.
        value, grad = loss.with_gradient(s, t, mask.cpu().numpy())
        ctx.grad = torch.from_numpy(grad).to(scores)
        return torch.tensor(value, dtype=torch.promote_types(scores.dtype, torch.float32), device=scores.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.grad * grads[0].to(ctx.grad), None, None, None


def parse_losses(text: str) -> CombinedLoss:
    """Parse ``ListMLELoss:1,MSE:0.02``; a name without a number has the weight 1."""
    terms = []
    for term in text.split(","):
        name, _, number = term.strip().partition(":")
        if name not in LOSSES:
            raise ConfigurationError(
                f"There is no loss {name!r}; use {', '.join(LOSSES)}, as in ListMLELoss:1,MSE:0.02."
            )
        terms.append((LOSSES[name], _weight(number or "1", term)))
    total = sum(weight for _, weight in terms)
    if total <= 0:
        raise ConfigurationError(f"The weights of the losses {text!r} must sum to more than zero.")
    return CombinedLoss(tuple((loss, weight / total) for loss, weight in terms))


def _weight(text: str, term: str) -> float:
    """Parse the weight of a loss; `term` is the whole text, for the error message."""
    try:
        weight = float(text)
    except ValueError:
        weight = float("nan")
    if not 0 <= weight < float("inf"):
        raise ConfigurationError(f"The loss {term!r} needs a weight of zero or more, as in MSE:0.02.")
    return weight
