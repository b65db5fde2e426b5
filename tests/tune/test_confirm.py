"""Confirming a tuned choice, with replayed readings: noise is refused, a real gain is kept, a busy machine is said."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tilewise._extension import native
from tilewise.errors import ConfigurationError
from tilewise.store.problem import Config, Problem
from tilewise.tune.choose.decide import decide
from tilewise.tune.measure import TrialResult
from tilewise.tune.measure.confirm import SETS, ConfirmedGain, OtherProcesses, _gain_of_sets, gain_of

PROBLEM = Problem.of("product", m=64, n=64)
CONFIGS = [Config.of(block=2**i) for i in range(3, 8)]


def replayed_sets(true_ratio: float, noise: float, seed: int, spikes: float = 0.0, elsewhere: float = 0.0):
    """Readings of the default (1 us) and of a choice, each disturbed at random and sometimes by a long pause."""
    rng = np.random.default_rng(seed)

    def readings(ns: float) -> list[float]:
        pauses = 1 + 20 * (rng.random(11) < spikes)
        return list(ns * np.exp(noise * np.abs(rng.standard_normal(11))) * pauses)

    return [(readings(1000.0), readings(1000.0 / true_ratio), {"elsewhere": elsewhere}) for _ in range(SETS)]


def test_equal_kernels_are_rarely_confirmed_and_the_interval_holds_the_true_ratio():
    gains = [_gain_of_sets(replayed_sets(1.0, 0.1, seed, spikes=0.1)) for seed in range(200)]
    assert sum(gain.excludes_zero for gain in gains) <= 12  # 2.5 % are expected
    assert sum(gain.low <= 1.0 <= gain.high for gain in gains) >= 180


def test_a_real_gain_is_confirmed_although_a_tenth_of_the_readings_contain_a_pause():
    gains = [_gain_of_sets(replayed_sets(1.05, 0.02, seed, spikes=0.1)) for seed in range(50)]
    assert sum(gain.excludes_zero for gain in gains) >= 48
    assert sum(gain.low <= 1.05 <= gain.high for gain in gains) >= 45


def test_a_busy_machine_is_recognized_by_the_guard_of_the_collectors_or_by_the_default():
    assert _gain_of_sets(replayed_sets(1.0, 0.0, 0, elsewhere=0.3)).on_busy_machine
    assert _gain_of_sets(replayed_sets(1.0, 0.2, 0)).on_busy_machine
    assert not _gain_of_sets(replayed_sets(1.0, 0.005, 0)).on_busy_machine


class LuckyBench:
    """Every configuration is as fast as the default, but the readings of the last one are too short."""

    def measure(self, config: Config) -> TrialResult:
        return TrialResult(30.0 if config == CONFIGS[-1] else 100.0, 100.0)

    def remeasure(self, configs):
        return [self.measure(config).runtime_ns for config in configs]


@pytest.mark.parametrize(("gain", "is_kept"), [((0.98, 0.95, 1.01), False), ((1.04, 1.01, 1.07), True)])
def test_a_winner_that_stands_alone_is_compared_again_and_its_ratio_is_the_second_one(gain, is_kept):
    decision = decide(
        PROBLEM, CONFIGS, None, None, LuckyBench(), budget=5, confirm=lambda config: ConfirmedGain(*gain, elsewhere=0.5)
    )
    assert (decision.config == CONFIGS[-1]) is is_kept
    assert decision.speedup == pytest.approx(gain[0] if is_kept else 1.0)
    assert any("busy" in note for note in decision.notes)
    assert any("not confirmed" in note for note in decision.notes) is not is_kept


def test_the_estimate_is_the_middle_of_the_log_ratios():
    gain = gain_of([math.log(1.1)] * SETS)
    assert gain.ratio == pytest.approx(1.1) == gain.low == gain.high


@pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
def test_other_processes_confirm_and_are_replaced_if_they_end():
    from tilewise.tune.families.cpu.family import get_family

    family = get_family("matmul")
    problem = family.problem({"family": "matmul", "m": 24, "n": 32, "k": 16})
    default, other = family.configs(problem)[:2]
    others = OtherProcesses()
    try:
        for _ in range(2):
            gain = others.confirm(problem, default, other, seed=1)
            assert 0 < gain.low <= gain.ratio <= gain.high < math.inf
            others.stop()
        with pytest.raises(ConfigurationError, match="no CPU kernel family"):  # it fails there, then here
            others.confirm(Problem.of("unknown", m=1, threads=1), default, other, seed=1)
    finally:
        others.stop()
