"""Callables that take turns are sampled alike."""

from __future__ import annotations

from tilewise.profile.timing.clock import time_interleaved


def test_each_runs_in_every_round_and_warm_up_does_not_count() -> None:
    order: list[str] = []
    times = time_interleaved([lambda: order.append("a"), lambda: order.append("b")], 3, calls=2, warmup=1)
    assert order == ["a", "a", "b", "b"] * 4
    assert [len(samples) for samples in times] == [3, 3]
    assert all(seconds >= 0 for samples in times for seconds in samples)


def test_each_may_have_a_number_of_calls_of_its_own() -> None:
    names: list[str] = []
    times = time_interleaved([lambda: names.append("a"), lambda: names.append("b")], 2, calls=[1, 3], warmup=0)
    assert names == ["a", "b", "b", "b"] * 2
    assert [len(own) for own in times] == [2, 2]
