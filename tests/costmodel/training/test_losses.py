"""The losses against plain loops over their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tilewise.costmodel.training import losses  # noqa: E402
from tilewise.errors import ConfigurationError  # noqa: E402


def _random_scores(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    target = torch.rand(3, 7, generator=generator, dtype=torch.float64) + 0.5
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, 4:] = False
    return scores, target, mask


def _of(function):
    """A loss by itself, for tensors."""
    return losses.CombinedLoss(((function, 1.0),))


def _list_mle(scores, target, mask, first):
    total = 0.0
    for s, t, m in zip(scores.tolist(), target.tolist(), mask.tolist(), strict=True):
        ranked = sorted([(ti, si) for si, ti, mi in zip(s, t, m, strict=True) if mi], reverse=first == "slowest")
        values = [si / 10 for _, si in ranked]
        total += sum(math.log(sum(math.exp(v) for v in values[i:])) - values[i] for i in range(len(values)))
    return total / len(scores)


def test_list_mle_is_the_likelihood_of_slowest_first():
    scores, target, mask = _random_scores()
    assert float(_of(losses.list_mle)(scores.detach(), target, mask)) == pytest.approx(
        _list_mle(scores, target, mask, "slowest")
    )


@pytest.mark.parametrize("name", sorted(losses.LOSSES))
def test_gradients_are_right_and_padding_has_none(name):
    scores, target, mask = _random_scores(1)
    function = _of(losses.LOSSES[name])
    assert torch.autograd.gradcheck(lambda s: function(s, target, mask), (scores,), atol=1e-4)
    function(scores, target, mask).backward()
    assert float(scores.grad[~mask].abs().max()) == 0.0


@pytest.mark.parametrize("name", sorted(losses.LOSSES))
def test_a_right_order_costs_less_than_a_wrong_one(name):
    target = torch.tensor([[1.0, 2.0, 4.0, 8.0]])
    mask = torch.ones_like(target, dtype=torch.bool)
    function = _of(losses.LOSSES[name])
    assert function(target.log(), target, mask) < function(-target.log(), target, mask)


def test_pairwise_hinge_is_the_sum_over_pairs_by_the_number_of_slots():
    scores, target, mask = _random_scores(2)
    total = 0.0
    for s, t, m in zip(scores.tolist(), target.tolist(), mask.tolist(), strict=True):
        for i in range(7):
            for j in range(7):
                if m[i] and m[j] and t[i] > t[j]:
                    total += max(0.0, 1 - (s[i] - s[j]) / 10)
    expected = total / float(mask.sum())
    assert float(_of(losses.pairwise_hinge)(scores.detach(), target, mask)) == pytest.approx(expected)


def test_weights_are_normalised_to_one():
    combined = losses.parse_losses("ListMLELoss:1,MSE:0.02")
    assert [round(w, 6) for _, w in combined.terms] == [round(1 / 1.02, 6), round(0.02 / 1.02, 6)]
    scores, target, mask = _random_scores(3)
    likelihood, squares = _of(losses.list_mle), _of(losses.mean_squared_error)
    by_hand = (likelihood(scores, target, mask) + 0.02 * squares(scores, target, mask)) / 1.02
    assert combined(scores, target, mask).item() == pytest.approx(by_hand.item(), rel=1e-5)


@pytest.mark.parametrize("name", ["ListMLELoss", "FastestFirst"])
def test_scores_that_are_far_apart_keep_the_likelihood_and_its_slope_finite(name):
    scores = 1e4 * np.random.default_rng(0).standard_normal((3, 6))
    target, mask = np.random.default_rng(1).random((3, 6)) + 0.5, np.ones((3, 6), bool)
    mask[0, 4:] = False
    value, slope = losses.LOSSES[name](scores, target, mask)
    assert np.isfinite(value) and np.isfinite(slope).all() and not slope[~mask].any()
    step = np.zeros_like(scores)
    step[1, 2] = 1e-3
    ends = [losses.LOSSES[name](scores + sign * step, target, mask)[0] for sign in (1, -1)]
    assert (ends[0] - ends[1]) / 2e-3 == pytest.approx(slope[1, 2], abs=1e-4)


def test_a_slate_of_one_and_equal_runtimes_have_finite_losses():
    for shape in ((2, 1), (2, 5)):
        for function in losses.LOSSES.values():
            scores = torch.zeros(shape, requires_grad=True)
            _of(function)(scores, torch.ones(shape), torch.ones(shape, dtype=torch.bool)).backward()
            assert np.isfinite(scores.grad.numpy()).all()


@pytest.mark.parametrize("text", ["", "Nope:1", "MSE:x", "MSE:-1", "MSE:0", "MSE:nan", "MSE:1,,"])
def test_a_bad_loss_string_is_one_sentence(text):
    with pytest.raises(ConfigurationError):
        losses.parse_losses(text)
