"""The metrics against brute force, and their behaviour on ties and degenerate kernels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.costmodel import metrics
from tilewise.errors import ShapeError

SMALL = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=30)


def _brute(target, scores):
    t, s = np.array(target), np.array(scores)
    dt, ds = np.sign(t[:, None] - t[None]), np.sign(s[:, None] - s[None])
    upper = np.triu(np.ones_like(dt, bool), 1)
    return int(((dt * ds) > 0)[upper].sum()), int(((dt * ds) < 0)[upper].sum())


@settings(derandomize=True, deadline=None, max_examples=200)
@given(SMALL)
def test_pairs_are_counted_exactly_with_ties(pairs):
    target, scores = zip(*pairs, strict=True)
    counts = metrics.count_pairs(target, scores)
    assert (counts.concordant, counts.discordant) == _brute(target, scores)


def test_kendall_matches_scipy_and_opa_scales_to_many_configurations():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    target, scores = rng.integers(1, 500, 3000), rng.integers(0, 400, 3000)
    assert metrics.kendall_tau(target, scores) == pytest.approx(stats.kendalltau(target, scores).statistic)
    many = rng.random(200_000) + 1
    assert metrics.opa(many, many) == 1.0 and metrics.opa(many, -many) == 0.0


def test_top_k_error_by_hand():
    target = [4.0, 2.0, 1.0, 8.0]
    assert metrics.top_k_error(target, [0, 1, 2, 3], 1) == 3.0
    assert metrics.top_k_error(target, [0, 1, 2, 3], 2) == 1.0
    assert metrics.top_k_error(target, [0, 1, 2, 3], 10) == 0.0
    assert metrics.tile_score([target], [[0, 1, 9, 2]]) == 1.0


def test_equal_scores_rank_in_the_order_of_configurations():
    assert metrics.ranking([1.0, 0.0, 0.0, 1.0]).tolist() == [1, 2, 0, 3]


def test_metrics_that_mean_nothing_are_nan_and_left_out_of_means():
    assert np.isnan(metrics.opa([1, 1], [1, 2])) and np.isnan(metrics.kendall_tau([3.0], [1.0]))
    interval = metrics.bootstrap([1.0, float("nan"), 3.0])
    assert interval.mean == 2.0 and 1.0 <= interval.low <= interval.high <= 3.0


def test_bootstrap_is_the_same_for_the_same_seed():
    values = np.random.default_rng(0).random(40)
    assert metrics.bootstrap(values, seed=3) == metrics.bootstrap(values, seed=3)


def test_noise_is_recovered_from_repeats_and_bounds_the_ceiling():
    rng = np.random.default_rng(0)
    feats = [np.repeat(np.arange(50.0)[:, None], 4, 0)]
    targets = [np.repeat(rng.uniform(1, 2, 50), 4) * np.exp(0.02 * rng.standard_normal(200))]
    noise = metrics.repeat_noise(feats, targets)
    assert noise == pytest.approx(0.02, rel=0.2)
    assert metrics.repeat_noise([np.arange(3.0)[:, None]], [np.ones(3)]) is None
    assert 0 <= metrics.noise_ceiling(targets, noise, 5) <= metrics.noise_ceiling(targets, noise, 1)


def test_lengths_must_agree():
    with pytest.raises(ShapeError):
        metrics.opa([1.0, 2.0], [1.0])
