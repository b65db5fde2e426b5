"""`tilewise calibrate`: what is tuned, what is kept, and what happens when it is cut short."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tilewise._extension import native
from tilewise.errors import ConfigurationError
from tilewise.tune.search.gaussian_process import Hyperparameters

pytestmark = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
if native is not None:
    from tilewise.store.problem import Problem
    from tilewise.tune.choose.cache import ChoiceFile, Decision
    from tilewise.tune.choose.calibrate import built_in_problems, calibrate
    from tilewise.tune.choose.decide import Scores
    from tilewise.tune.choose.tuned_table import CALIBRATED, load_tuned_table, machine_name
    from tilewise.tune.choose.tuner import Tuner
    from tilewise.tune.families.cpu.family import get_family, product_tile
    from tilewise.tune.families.cpu.matmul import near_products
    from tilewise.tune.measure import TrialResult
    from tilewise.tune.measure.confirm import ConfirmedGain
    from tilewise.tune.measure.cpu.device import CpuDevice, CpuTrial


def product(m: int, n: int, k: int, threads: int = 1) -> Problem:
    return get_family("matmul").problem({"family": "matmul", "m": m, "n": n, "k": k, "threads": threads})


@pytest.fixture
def measured_problems(monkeypatch):
    """A machine on which the second configuration of any kernel takes nine tenths of the default's time."""
    choices = []

    def measure(self, config):
        choices.append(self.problem)
        return TrialResult(900.0 if config == near_products(native, self.problem)[1] else 1000.0, 1000.0)

    monkeypatch.setattr(CpuTrial, "measure", measure)
    monkeypatch.setattr(CpuTrial, "remeasure", lambda self, configs: [measure(self, c).runtime_ns for c in configs])
    monkeypatch.setattr(CpuDevice, "confirm", lambda self, problem, config: ConfirmedGain(1 / 0.9, 1.1, 1.2))
    monkeypatch.setattr(Tuner, "_is_safe_elsewhere", lambda self, problem, config: True)
    return choices


PROBLEMS = [(20, 64, 64), (30, 64, 64), (40, 64, 64)]


class Liked:
    """Scores by which the fastest of that machine is measured first."""

    margin, name = 0.0, "liked"

    def __init__(self) -> None:
        self.hyper = Hyperparameters()

    def rank(self, problem, configs):
        values = [config != near_products(native, problem)[1] for config in configs]
        return Scores(self.hyper, np.array(values, np.float64), self.margin)


@pytest.fixture
def liked(monkeypatch):
    monkeypatch.setattr(Tuner, "_model", lambda self, model: Liked())


def test_the_kernels_are_a_few_dozen_of_all_families_and_thread_counts(tmp_path: Path):
    kernels = built_in_problems(Tuner("cpu", cache=tmp_path), 2)
    assert 40 <= len(kernels) <= 100
    assert {(p.family, p.threads) for p in kernels[:20]} >= {("matmul", 1), ("matmul", 2), ("conv2d", 1)}


def test_what_wins_twice_is_kept_and_said(tmp_path: Path, measured_problems, liked):
    problems = [product(*sizes) for sizes in PROBLEMS]
    report = calibrate(problems, folder=tmp_path)
    assert report["kernels"] == report["replaced"] == 3 and report["left"] == 0
    assert [line["speedup"] for line in report["lines"]] == [pytest.approx(1 / 0.9)]
    assert load_tuned_table(native, tmp_path)[0].tiles and json.dumps(report)


def test_a_tile_that_does_not_win_again_is_not_kept(tmp_path: Path, measured_problems, liked, monkeypatch):
    problem = product(*PROBLEMS[0])
    monkeypatch.setattr(CpuDevice, "confirm", lambda self, problem, config: ConfirmedGain(1.01, 0.99, 1.03))
    report = calibrate([problem], folder=tmp_path)
    assert report["replaced"] == report["busy"] == 0 and report["lines"][0]["speedup"] == 1.0
    assert set(load_tuned_table(native, tmp_path)[0].tiles.values()) == {None}


def test_what_a_busy_machine_left_undecided_is_said_and_tuned_again(
    tmp_path: Path, measured_problems, liked, monkeypatch
):
    problem = product(*PROBLEMS[0])
    monkeypatch.setattr(CpuDevice, "confirm", lambda self, problem, config: ConfirmedGain(1.01, 0.99, 1.03, 0.5))
    report = calibrate([problem], folder=tmp_path)
    assert report["replaced"] == 0 and report["busy"] == report["left"] == 1
    assert not load_tuned_table(native, tmp_path)[0].tiles


def test_a_run_that_was_cut_off_goes_on_where_it_was(tmp_path: Path, measured_problems):
    problems = [product(*sizes) for sizes in PROBLEMS]

    def stop(done, total, text):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(problems, folder=tmp_path, progress=stop)
    assert set(measured_problems) == set(problems[:2])
    measured_problems.clear()
    assert calibrate(problems, folder=tmp_path)["left"] == 0
    again = [measured_problems.count(problem) for problem in problems]  # a tile that was kept is timed once more
    assert max(again[:2]) <= 1 < again[2]


def test_what_there_was_no_time_for_is_said(tmp_path: Path, measured_problems):
    report = calibrate([product(*sizes) for sizes in PROBLEMS], folder=tmp_path, minutes=1e-9)
    assert report["kernels"] == 0 and report["left"] == 3
    with pytest.raises(ConfigurationError, match="minutes"):
        calibrate(folder=tmp_path, minutes=0)


def test_what_was_tuned_goes_before_what_was_calibrated(tmp_path: Path):
    problem = product(60, 80, 150)
    tiles = near_products(native, problem)
    for folder, tile in ((tmp_path / CALIBRATED, tiles[1]), (tmp_path, tiles[2])):
        ChoiceFile(folder, machine_name(native)).put(Decision(problem, tile, "measured", 1.0, None, 5, False))
        tuned_tiles = load_tuned_table(native, tmp_path)[0].tiles
        assert [tile for (threads, _), tile in tuned_tiles.items() if threads == 1] == [product_tile(tile)]


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "tilewise", "calibrate", *arguments]
    return subprocess.run(line, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def test_a_folder_that_cannot_be_written_is_one_sentence_before_anything_is_measured(tmp_path: Path):
    (tmp_path / "file").write_text("")
    output = command("--cache", str(tmp_path / "file" / "below"))
    assert output.returncode == 2 and output.stderr.count("\n") == 1 and "cannot be written" in output.stderr


def invoke(*arguments: str) -> str:
    from tilewise.cli.app import app, command_line

    command_line()
    return CliRunner().invoke(app, ["calibrate", *arguments], catch_exceptions=False).stdout


def test_show_and_reset(tmp_path: Path, measured_problems):
    assert "not calibrated" in invoke("--show", "--cache", str(tmp_path))
    calibrate([product(*PROBLEMS[0])], folder=tmp_path)
    assert json.loads(invoke("--show", "--json", "--cache", str(tmp_path)))["families"] == ["matmul"]
    assert "Removed" in invoke("--reset", "--cache", str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_the_next_process_uses_what_was_calibrated(tmp_path: Path):
    problem = product(60, 80, 150)
    tile = near_products(native, problem)[1]
    ChoiceFile(tmp_path / "tune" / CALIBRATED, machine_name(native)).put(
        Decision(problem, tile, "measured", 1.0, None, 5, False)
    )
    code = """
import json, numpy as np, tilewise
tilewise.set_num_threads(1)
from tilewise.backend import current_backend
tile = current_backend().explain("matmul", np.ones((60, 150), np.float32), np.ones((150, 80), np.float32)).tile
print(json.dumps(tile.as_dict()))
"""
    variables = {**os.environ, "TILEWISE_CACHE": str(tmp_path), "TILEWISE_TUNED": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == product_tile(tile).as_dict()


def test_a_calibration_is_offered_once_and_only_where_there_is_none(tmp_path: Path, monkeypatch):
    from tilewise.backend.tuned import calibration_offer

    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    monkeypatch.setenv("TILEWISE_TUNED", "1")
    assert "tilewise calibrate" in (calibration_offer() or "") and calibration_offer() is None
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "other"))
    (tmp_path / "other" / "tune" / CALIBRATED).mkdir(parents=True)
    assert calibration_offer() is None


def test_the_command_offers_help_with_an_example():
    assert "Example" in invoke("--help")
