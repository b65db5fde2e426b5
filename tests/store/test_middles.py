"""One number for a handful of timings: what it is, and that it does not depend on how many there are."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest

from tilewise.store.aggregate import faster_two_of_three


@pytest.mark.parametrize("count", [3, 4, 7, 12])
def test_it_is_the_mean_of_the_faster_two_over_every_three(count: int) -> None:
    times = np.random.default_rng(count).exponential(size=count).tolist()
    expected = statistics.fmean(sum(sorted(three)[:2]) / 2 for three in itertools.combinations(times, 3))
    assert faster_two_of_three(times) == pytest.approx(expected)


def test_more_timings_do_not_make_a_configuration_look_faster() -> None:
    chance = np.random.default_rng(0)
    means = [np.mean([faster_two_of_three(chance.exponential(size=n).tolist()) for _ in range(6000)]) for n in (3, 30)]
    assert means[0] == pytest.approx(means[1], rel=0.03)


def test_of_fewer_than_three_the_fastest_counts() -> None:
    assert faster_two_of_three([5.0]) == 5.0
    assert faster_two_of_three([5.0, 4.0]) == 4.0
