"""Sweeps: trials that follow from their number, folds that share nothing, and the same best after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.fleet.rays import NEEDS_RAY, cluster_of
from tests.waiting import until
from tilewise.costmodel.data.dataset import load_dataset
from tilewise.errors import ConfigurationError
from tilewise_fleet.sweep import Sweep, best_of, fold_of, read_result, run_trial

SMALL = {"epochs": 3, "eval_every": 1, "configs": 16}


def test_trials_follow_from_the_sweeps_seed_and_their_number_alone() -> None:
    sweep = Sweep("cpu", "out", seeds=2, folds=2, draws=3)
    trials = sweep.trials()
    assert len(trials) == 12 and trials == Sweep("cpu", "out", seeds=2, folds=2, draws=3).trials()
    assert len({trial["learning_rate"] for trial in trials}) == 3
    assert Sweep("cpu", "out", seed=1, draws=3).trials()[1] != Sweep("cpu", "out", draws=3).trials()[1]
    with pytest.raises(ConfigurationError, match="at least one"):
        Sweep("cpu", "out", folds=0)


def test_folds_hold_out_every_kernel_once() -> None:
    data = load_dataset("cpu", limit=40)
    names = [kernel.name for fold in range(3) for kernel in fold_of(data, fold, 3).valid]
    assert sorted(names) == sorted(kernel.name for split in (data.train, data.valid) for kernel in split)
    for fold in range(3):
        part = fold_of(data, fold, 3)
        assert not {k.name for k in part.train} & {k.name for k in part.valid}


def test_the_best_draw_is_that_of_the_best_mean_and_the_first_of_equals() -> None:
    rows = [{"trial": i, "draw": i // 2, "value": v} for i, v in enumerate([0.9, 0.1, 0.6, 0.7, 0.7, 0.6])]
    best, mean = best_of(rows)
    assert (best["trial"], round(mean, 6)) == (3, 0.65)


def test_a_finished_trial_is_not_trained_again(tmp_path: Path) -> None:
    sweep = Sweep("cpu", str(tmp_path), "MLP", settings=SMALL, limit=12)
    trial, rows = sweep.trials()[0], []
    first = run_trial(sweep, trial, rows.append)
    assert len(rows) == 3 and first["epochs"] == 3
    assert run_trial(sweep, trial, rows.append) == first
    assert len(rows) == 3
    assert (tmp_path / "trial_000" / "model.safetensors").is_file()


def test_a_draw_varies_its_settings_around_the_first(tmp_path: Path) -> None:
    sweep = Sweep("cpu", "out", "MLP", draws=40)
    base, *variations = (sweep.draw_settings(draw) for draw in range(40))
    rates = [row["learning_rate"] / base["learning_rate"] for row in variations]
    assert 10**-0.71 < min(rates) < 0.3 and 2 < max(rates) < 10**0.51
    assert {row["weight_decay"] for row in variations} == {0.0, 0.005, 0.02, 0.05}
    assert {row["batch"] / base["batch"] for row in variations} == {0.5, 1, 2}
    assert Sweep("cpu", "out", folds=20).folds == 20
    with pytest.raises(ConfigurationError, match="1 to 20 folds"):
        Sweep("cpu", "out", folds=21)
    with pytest.raises(ConfigurationError, match="need as many kernels"):
        fold_of(load_dataset("cpu", limit=8), 0, 20)


def test_a_result_counts_only_for_its_own_settings(tmp_path: Path) -> None:
    trial, path = {"trial": 3, "seed": 1}, tmp_path / "result.json"
    assert read_result(path, trial) is None
    for content, counts in (
        ({**trial, "value": 0.5, "epochs": 9}, True),
        ({**trial, "value": None}, False),
        (trial, False),
        ({**trial, "seed": 2, "value": 0.5}, False),
        ([0.5], False),
    ):
        path.write_text(json.dumps(content))
        assert (read_result(path, trial) == content) is counts
    with pytest.raises(ConfigurationError, match="No trial"):
        best_of([{"trial": 0, "draw": 0, "value": float("nan")}])


class Command:
    """`tilewise tiles train --ray` in a process of its own."""

    def __init__(self, address: str, out: Path, *words: str) -> None:
        options = ["--model", "MLP", "--epochs", "6", "--limit", "24", "--draws", "8", "--seeds", "2", *words]
        base = [sys.executable, "-m", "tilewise.cli.app", "tiles", "train", "cpu", "--out", str(out), "--ray", address]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        self.out = out
        self.process = subprocess.Popen(
            [*base, *options, "--json"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def done(self) -> int:
        return len(list(self.out.glob("trial_*/result.json")))

    def answer(self) -> dict[str, object]:
        output, _ = self.process.communicate(timeout=280)
        assert self.process.returncode == 0
        return dict(json.loads(output.splitlines()[-1]))


@NEEDS_RAY
@pytest.mark.slow
def test_killed_and_resumed_a_sweep_gives_the_same_best_trial(tmp_path: Path) -> None:
    with cluster_of(1, cpus=2) as cluster:
        started = time.perf_counter()
        straight = Command(cluster.address, tmp_path / "straight").answer()
        seconds = time.perf_counter() - started
        killed = Command(cluster.address, tmp_path / "killed")
        until(lambda: killed.done() >= 5, "a third of the trials", 200)
        killed.process.send_signal(signal.SIGKILL)
        killed.process.communicate()
        before = killed.done()
        resumed = Command(cluster.address, tmp_path / "killed").answer()

    def without_times(answer: dict[str, object]) -> dict[str, object]:
        assert isinstance(answer["best"], dict)
        return {name: value for name, value in answer["best"].items() if name != "seconds"}

    assert 5 <= before < 16
    assert without_times(straight) == without_times(resumed)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("straight", "killed"))
    assert len(one) == len(two)
    print(f"\n16 trials in {seconds:.1f} s; killed after {before}, the same best: {without_times(resumed)}")
