"""Each kind of bad series is named, and a good one is not."""

from __future__ import annotations

import numpy as np
import pytest

from tilewise.profile.timing.stability import MachineReading, machine_reasons, sample_reasons
from tilewise.profile.timing.statistics import bootstrap_intervals, normal_quantile, signed_rank_test

NOISE = np.random.default_rng(0).normal(1.0, 0.01, 100)


@pytest.mark.parametrize("seed", range(10))
def test_steady_samples_are_not_accused(seed):
    random = np.random.default_rng(seed)
    assert sample_reasons(1e-3 * (1 + 0.02 * np.abs(random.standard_normal(100)))) == []


@pytest.mark.parametrize(
    ("samples", "word"),
    [
        (NOISE * np.linspace(1, 1.2, 100), "drift"),
        (NOISE * np.where(np.arange(100) % 2, 1.0, 1.3), "two modes"),
        (NOISE * np.where(np.arange(100) % 10, 1.0, 4.0), "outliers"),
        (np.random.default_rng(1).uniform(1, 2, 100), "spread"),
    ],
    ids=["drift", "two modes", "outliers", "spread"],
)
def test_the_trouble_is_named(samples, word):
    assert any(reason.startswith(word) for reason in sample_reasons(samples))


def test_other_processes_and_a_changed_clock_are_named(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    before = MachineReading(0.0, 0.0, 0.0, 0.0, 1.0)
    after = MachineReading(10.0, 9.0, 18.0, 3.0, 1.5)
    text = " ".join(machine_reasons(before, after))
    assert "0.9 of 2 CPUs" in text and "30% of a CPU" in text and "frequency" in text
    assert machine_reasons(before, MachineReading(10.0, 9.0, 9.1, 0.0, 1.0)) == []


def test_bootstrap_intervals_cover_the_true_median():
    random = np.random.default_rng(3)
    covered = 0
    for seed in range(50):
        samples = random.lognormal(0.0, 0.5, 100)
        interval = bootstrap_intervals(samples, {"m": lambda d: np.median(d, axis=1)}, resamples=400, seed=seed)["m"]
        covered += 1.0 in interval
    assert covered >= 43


def test_the_signed_rank_test_agrees_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    for seed in range(5):
        differences = np.random.default_rng(seed).normal(0.2, 1.0, 60)
        ours = signed_rank_test(differences, permutations=20_000)
        assert ours.p_value == pytest.approx(stats.wilcoxon(differences).pvalue, abs=0.02)
        assert ours.centre in ours.interval


def test_the_normal_quantile_is_the_textbook_one():
    assert normal_quantile(0.975) == pytest.approx(1.959964, abs=1e-6)
