"""Promises of Timer.compare, on a simulated clock: the machine's noise must not decide whether these pass."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tilewise.errors import ConfigurationError
from tilewise.profile import MeasurementError, TimeLimitError, Timer
from tilewise.profile.timing import clock


class NoisyClock:
    """A 1 ms function on a bad day: 3 % jitter, slow drift of 20 %, one sample in ten delayed by up to double."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.turn = 0
        monkeypatch.setattr(clock, "seconds_per_call", self.sample)
        monkeypatch.setattr(clock, "calibrate", lambda func, seconds: 1)

    def sample(self, func, calls):
        self.turn += 1
        delay = self.random.random() if self.random.random() < 0.1 else 0.0
        drift = 1 + 0.2 * np.sin(self.turn / 40)
        return 1e-3 * func() * drift * (1 + 0.03 * abs(self.random.standard_normal()) + delay)


def differences_called(monkeypatch, factor: float, trials: int = 40) -> int:
    calls = 0
    for seed in range(trials):
        NoisyClock(monkeypatch, seed)
        calls += Timer(seed=seed).compare({"a": lambda: 1.0, "b": lambda: factor}).different
    return calls


def test_identical_functions_are_no_difference(monkeypatch):
    assert differences_called(monkeypatch, 1.0) <= 1


def test_a_placement_effect_of_one_percent_is_no_difference(monkeypatch):
    assert differences_called(monkeypatch, 1.01) <= 1


@pytest.mark.parametrize("factor", [1.05, 1 / 1.05])
def test_a_true_five_percent_is_found(monkeypatch, factor):
    assert differences_called(monkeypatch, factor) >= 38


def test_the_interval_covers_the_true_ratio(monkeypatch):
    covered = 0
    for seed in range(40):
        NoisyClock(monkeypatch, 100 + seed)
        covered += 1.1 in Timer(seed=seed).compare({"a": lambda: 1.0, "b": lambda: 1.1}).interval
    assert covered >= 34


def test_noise_asks_for_more_rounds_and_quiet_does_not(monkeypatch):
    monkeypatch.setattr(clock, "calibrate", lambda func, seconds: 1)
    monkeypatch.setattr(clock, "seconds_per_call", lambda func, calls: 1e-3)
    assert Timer().compare({"a": int, "b": int}, runs=20).blocks == 10
    random = np.random.default_rng(0)
    monkeypatch.setattr(clock, "seconds_per_call", lambda func, calls: 1e-3 * np.exp(random.standard_normal()))
    assert Timer().compare({"a": int, "b": int}, runs=20).blocks == 40


def test_every_block_runs_each_function_forwards_and_backwards(monkeypatch):
    order = []
    monkeypatch.setattr(clock, "calibrate", lambda func, seconds: 1)
    monkeypatch.setattr(clock, "timed_calls", lambda func, calls: 0)
    monkeypatch.setattr(clock, "seconds_per_call", lambda func, calls: order.append(func()) or 1e-3)
    Timer().compare({name: (lambda name=name: name) for name in "abc"}, runs=20, max_runs=20)
    blocks = [order[i : i + 6] for i in range(0, len(order), 6)]
    assert all(block == block[::-1] and sorted(block[:3]) == ["a", "b", "c"] for block in blocks)
    assert len({tuple(block) for block in blocks}) > 1


def test_several_functions_are_each_compared_with_the_first(monkeypatch):
    NoisyClock(monkeypatch, 0)
    result = Timer().compare({"a": lambda: 1.0, "b": lambda: 1.2, "c": lambda: 1.0})
    assert result.ratios["b"].different and not result.ratios["c"].different
    assert "b is slower than a" in result.verdict and "no difference between c and a" in result.verdict
    with pytest.raises(ConfigurationError, match="several ratios"):
        _ = result.ratio


def test_a_function_that_raises_gives_no_comparison():
    with pytest.raises(MeasurementError, match="ZeroDivisionError"):
        Timer().compare({"a": lambda: 1, "b": lambda: 1 / 0})


def test_a_function_that_never_ends_gives_no_comparison():
    with pytest.raises(TimeLimitError):
        Timer().compare({"a": lambda: 1, "b": lambda: time.sleep(1000)}, time_limit=0.2)


def test_one_function_is_not_a_comparison():
    with pytest.raises(ConfigurationError, match="two functions"):
        Timer().compare({"a": lambda: 1})


def test_fewer_rounds_than_a_test_needs_are_given_where_they_are_allowed_and_called_no_difference():
    result = Timer().compare({"a": lambda: None, "b": lambda: sum(range(20_000))}, runs=2, max_runs=2, min_runs=2)
    assert result.blocks == 1
    assert not result.different
    with pytest.raises(ConfigurationError):
        Timer().compare({"a": lambda: None, "b": lambda: None}, runs=2)
