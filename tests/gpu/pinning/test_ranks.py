"""The simulation of measuring and pinned ranks."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.ranks import main, simulate


def test_noise_makes_measuring_ranks_disagree_and_pinned_ones_never() -> None:
    rng = np.random.default_rng(1)
    runtimes = [1 + 0.05 * rng.random(50) for _ in range(40)]
    choices = [int(np.argsort(runtime)[3]) for runtime in runtimes]
    quiet, noisy = (simulate(runtimes, choices, noise, 8, 0) for noise in (1e-9, 0.03))
    assert quiet["agree"] == 1 and quiet["measured"] == pytest.approx(1)
    assert noisy["agree"] < 0.2 and noisy["measured"] < quiet["measured"]
    assert quiet["pinned"] == noisy["pinned"] > 0.98


def test_the_recorded_kernels_are_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ranks", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "140 kernels, 4 ranks" and len(lines) == 4
