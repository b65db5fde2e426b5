"""Callables that take turns are sampled alike."""

from __future__ import annotations

from tilewise.profile.timing.turns import take_turns


def test_each_runs_in_every_round_and_warm_up_does_not_count() -> None:
    order: list[str] = []
    times = take_turns([lambda: order.append("a"), lambda: order.append("b")], 3, calls=2, warmup=1)
    assert order == ["a", "a", "b", "b"] * 4
    assert [len(samples) for samples in times] == [3, 3]
    assert all(seconds >= 0 for samples in times for seconds in samples)
